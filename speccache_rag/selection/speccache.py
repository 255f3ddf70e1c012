"""The policy of the SpecCache paper (ACL 2026), sections 2.2 and 2.3: importance, then span completion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.scoring.questions import Importance, Question
from speccache_rag.selection import spans
from speccache_rag.selection.base import Answers, SelectionPolicy, check_number, chunk_scores
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class SpecCachePolicy(SelectionPolicy):
    """The K most important chunk tokens, and the rest of every span that they nearly fill.

    The paper caps the completed set and drops the least important tokens. A cap of K would undo the completion
    exactly, so the cap is ceil((1 + completion_slack) * K): this is the slack by which `choose` may pass its budget.
    """

    tau_smooth: float = 0.4
    """Relative change of importance below which neighbours share a span."""
    tau_cover: float = 0.7
    """Chosen share from which a span is taken whole."""
    max_span: int = 16
    """Tokens."""
    completion_slack: float = 0.25
    """Share of K that completion may add."""
    complete: bool = True
    """False leaves span completion out (for ablations); the slack is then unused."""
    layers: LayerRange = "last_third"
    """Layers of the speculative model whose hidden norms are averaged."""

    def __post_init__(self) -> None:
        check_number("tau_smooth", self.tau_smooth, low=0)
        check_number("tau_cover", self.tau_cover, low=0, high=1)
        check_number("max_span", self.max_span, low=1, whole=True)
        check_number("completion_slack", self.completion_slack, low=0)
        if not isinstance(self.complete, bool):
            raise ConfigurationError(f"complete is {self.complete!r}; it must be true or false.")
        counted_layers(1, self.layers)

    def questions(self) -> tuple[Question, ...]:
        """The importance of every token."""
        return (Importance(self.layers),)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions by importance, int64; at most ceil((1 + completion_slack) * budget) of them.

        Raises:
            ValueError: the importance is not one finite score for each chunk token.
        """
        (question,) = self.questions()
        importance = chunk_scores(prompt, answers[question], "importance")
        positions = prompt.chunk_positions()
        n = len(positions)
        ranking = np.argsort(-importance, kind="stable")  # stable: ties by position
        chosen = np.zeros(n, dtype=bool)
        chosen[ranking[:budget]] = True
        if self.complete:
            chunk_of = np.repeat(np.arange(len(prompt.placements)), [p.length for p in prompt.placements])
            span_of = spans.split_spans(importance, chunk_of, self.tau_smooth, self.max_span)
            chosen = spans.complete(chosen, span_of, self.tau_cover)
        cap = math.ceil(min(n, (1 + self.completion_slack) * budget) - 1e-9)
        kept = ranking[chosen[ranking]][:cap]
        return np.sort(positions[kept])
