"""`attended`: the tokens the query attends to, a query-aware sibling of the paper's score (docs/policies.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.scoring.questions import QueryAttention, Question
from speccache_rag.selection.base import Answers, SelectionPolicy, chunk_scores, top_k
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class Attended(SelectionPolicy):
    """The K chunk tokens that the query attends to most in the deep layers of a scoring model.

    The scorer reuses its own chunk KV and runs little more than the query, so it costs a forward pass of a few dozen
    tokens, and it sees the question; a causal model's hidden norms at chunk tokens cannot.
    """

    scorer: Literal["speculative", "target"] = "speculative"
    layers: LayerRange = "last_third"

    def __post_init__(self) -> None:
        if self.scorer not in ("speculative", "target"):
            raise ConfigurationError(f"scorer is {self.scorer!r}; it must be 'speculative' or 'target'.")
        counted_layers(1, self.layers)

    def questions(self) -> tuple[Question, ...]:
        """The attention of the query in the scorer's layers."""
        return (QueryAttention(self.scorer, self.layers),)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget`."""
        (question,) = self.questions()
        return top_k(prompt, chunk_scores(prompt, answers[question], "query attention"), budget)
