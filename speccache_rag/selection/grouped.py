"""`grouped`: another policy, told the same score for neighbours, so that it takes them together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccache_rag.selection.base import Answers, check_number
from speccache_rag.selection.wrapper import Wrapper
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class Grouped(Wrapper):
    """Scores are averaged over groups of `tokens` neighbours, counted from the start of each chunk.

    Fewer runs of consecutive positions come of it, and attention over few runs is cheaper.
    """

    tokens: int = 16

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, low=2, whole=True)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget` and the slack of the inner policy."""
        averaged = {question: self._averaged(prompt, scores) for question, scores in answers.items()}
        return self.inner.choose(prompt, budget, averaged)

    def _averaged(self, prompt: AssembledPrompt, scores: np.ndarray) -> np.ndarray:
        averaged = scores.astype(np.float64)
        for placement in prompt.placements:
            for start in range(placement.start, placement.end, self.tokens):
                group = averaged[start : min(start + self.tokens, placement.end)]
                group[:] = group.mean()
        return averaged.astype(np.float32)
