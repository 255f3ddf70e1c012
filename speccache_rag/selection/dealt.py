"""`dealt`: another policy, chunk by chunk, each with a budget by the attention that the query pays it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.scoring.questions import QueryAttention, Question
from speccache_rag.selection.base import Answers, chunk_scores
from speccache_rag.selection.wrapper import Wrapper
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class Dealt(Wrapper):
    """A chunk that the query ignores gets nothing. What a small chunk cannot take goes to the others."""

    scorer: Literal["speculative", "target"] = "target"
    layers: LayerRange = "last_third"

    def __post_init__(self) -> None:
        counted_layers(1, self.layers)

    def questions(self) -> tuple[Question, ...]:
        """The attention of the query, and what the inner policy asks."""
        return tuple(dict.fromkeys((QueryAttention(self.scorer, self.layers), *self.inner.questions())))

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget` and the slack of the inner policy."""
        scores = chunk_scores(prompt, answers[QueryAttention(self.scorer, self.layers)], "query attention")
        lengths = np.array([p.length for p in prompt.placements])
        mass = np.add.reduceat(scores.astype(np.float64), np.cumsum(lengths) - lengths)
        shares = deal(budget, mass, lengths)
        chosen = [
            self.choose_within(prompt, [placement], int(share), answers)
            for placement, share in zip(prompt.placements, shares, strict=True)
        ]
        return np.concatenate(chosen)


def deal(budget: int, mass: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """int64 [n]: `budget` dealt in proportion to `mass` [n], nobody above its limit; sums to at most `budget`."""
    dealt = np.zeros(len(mass), dtype=np.int64)
    open_ = mass > 0
    while (left := budget - int(dealt.sum())) > 0 and open_.any():
        weight = np.where(open_, mass, 0.0)
        more = np.floor(left * weight / weight.sum()).astype(np.int64)
        if not more.any():
            more[np.argsort(-weight, kind="stable")[:left]] = 1
            more[~open_] = 0
        dealt = np.minimum(dealt + more, limits)
        open_ &= dealt < limits
    return dealt
