"""Policies to compare with: the two ends, which ignore the recompute ratio, and chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from speccache_rag.selection.base import Answers, SelectionPolicy, check_number
from speccache_rag.types import AssembledPrompt


class End(SelectionPolicy):
    """One of the two ends, at which there is nothing to choose."""

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """The first `budget` chunk positions; the budget of an end is none of them or all."""
        return prompt.chunk_positions()[:budget]


@dataclass(frozen=True)
class FullReuse(End):
    """Recompute no chunk token, whatever the ratio: the fastest, and the worst in quality."""

    fixed_ratio: ClassVar[float | None] = 0.0


@dataclass(frozen=True)
class FullRecompute(End):
    """Plain prefill, whatever the ratio: no stored KV is used. The reference for quality and TTFT."""

    reuses: ClassVar[bool] = False
    fixed_ratio: ClassVar[float | None] = 1.0


@dataclass(frozen=True)
class RandomSelection(SelectionPolicy):
    """K chunk tokens by chance: what a policy must beat.

    The same seed and prompt give the same tokens, and a larger ratio adds to those of a smaller one.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_number("seed", self.seed, low=0, whole=True)

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """`budget` chunk positions, int64, in random order."""
        generator = np.random.default_rng([self.seed, prompt.n_tokens])
        return generator.permutation(prompt.chunk_positions())[:budget]
