"""CacheBlend: the tokens whose KV deviates most in an early layer (Yao et al., EuroSys 2025, arXiv 2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.questions import KVDeviation, Question
from speccache_rag.selection.base import Answers, SelectionPolicy, check_number, chunk_scores, top_k
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class CacheBlend(SelectionPolicy):
    """The K chunk tokens with the largest squared deviation of stored from true KV at layer index 1 of the target.

    Values as in the authors' artifact, or keys as in LMCache. One selection for all layers, as both of them ship it;
    the paper's gradual filtering from layer to layer is in neither. The query is always recomputed whole.
    """

    of: Literal["value", "key"] = "value"
    layer: int = 1
    """Layer index, from 0; layer 0 never deviates."""

    def __post_init__(self) -> None:
        check_number("layer", self.layer, low=1, whole=True)
        if self.of not in ("value", "key"):
            raise ConfigurationError(f"of is {self.of!r}; it must be 'value' or 'key'.")

    def questions(self) -> tuple[Question, ...]:
        """The deviation of stored KV in one layer."""
        return (KVDeviation(self.of, self.layer),)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget`."""
        (question,) = self.questions()
        return top_k(prompt, chunk_scores(prompt, answers[question], "KV deviation"), budget)
