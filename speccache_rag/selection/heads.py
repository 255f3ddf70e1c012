"""`heads`: the first tokens of each chunk, then another policy with what is left of the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccache_rag.selection.base import Answers, check_number
from speccache_rag.selection.epic import Epic
from speccache_rag.selection.wrapper import Wrapper
from speccache_rag.types import AssembledPrompt, Placement


@dataclass(frozen=True)
class Heads(Wrapper):
    """The first `tokens` tokens of each chunk, whose KV is worst; the inner policy chooses among the others.

    Where the budget does not reach for all heads, they get it alone, as under `epic`.
    """

    tokens: int = 8

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, low=1, whole=True)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget` and the slack of the inner policy."""
        heads = [Placement(p.chunk, p.start, min(p.length, self.tokens)) for p in prompt.placements]
        n_heads = sum(p.length for p in heads)
        if n_heads >= budget:
            return Epic().choose(prompt, budget, answers)
        first = np.concatenate([np.arange(p.start, p.end) for p in heads])
        rest = [Placement(p.chunk, h.end, p.length - h.length) for p, h in zip(prompt.placements, heads, strict=True)]
        others = self.choose_within(prompt, [p for p in rest if p.length], budget - n_heads, answers)
        return np.concatenate((first, others))
