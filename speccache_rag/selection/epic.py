"""EPIC: the first tokens of each chunk (Hu et al., Efficient Position-Independent Caching, arXiv 2410.15332)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speccache_rag.selection.base import Answers, SelectionPolicy
from speccache_rag.types import AssembledPrompt


@dataclass(frozen=True)
class Epic(SelectionPolicy):
    """The first k tokens of each chunk, the same k for all: KV captured alone is worst where a chunk begins.

    k = floor(K / chunks) as in the paper's LegoLink; what chunks shorter than k leave of the budget goes to the others,
    so that policies are compared at equal numbers of tokens.
    """

    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions, int64, at most `budget`."""
        offsets = np.concatenate([np.arange(p.length) for p in prompt.placements])
        # Sorted by place in the chunk, then by prompt position: the first tokens of all chunks, the second ones, ...
        order = np.argsort(offsets, kind="stable")
        return prompt.chunk_positions()[order[:budget]]
