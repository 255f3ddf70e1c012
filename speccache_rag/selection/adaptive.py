"""`adaptive`: another policy, which stops where little of the score is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.selection.base import Answers, check_number, chunk_scores
from speccache_rag.selection.wrapper import Wrapper
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class Adaptive(Wrapper):
    """The budget is what it takes to cover `mass` of the inner policy's score, and at most what the ratio gives.

    A prompt whose score stands on few tokens so pays for few.
    """

    mass: float = 0.5

    def __post_init__(self) -> None:
        check_number("mass", self.mass, low=0, high=1)
        if len(self.inner.questions()) != 1:
            raise ConfigurationError(
                f"adaptive stands before {type(self.inner).__name__}, which has no score of its own to look at.",
                hint="Put it before a policy with one score, such as attended.",
            )

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget` and the slack of the inner policy."""
        (question,) = self.questions()
        scores = np.sort(chunk_scores(prompt, answers[question], "score").astype(np.float64))[::-1]
        enough = int(np.searchsorted(np.cumsum(scores), self.mass * scores.sum())) + 1
        return self.inner.choose(prompt, min(budget, enough), answers)
