"""`Placing`: the rules that say which of a prompt's known chunks are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from speccache_rag.engines.reuse.plan import ChunkState, PlannedChunk
from speccache_rag.store.base import Namespace
from speccache_rag.types import AssembledPrompt, ChunkKey, Placement


@dataclass(frozen=True, slots=True)
class Placing:
    """The rules by which a placement is worth loading.

    A placement of fewer than `min_reuse_tokens` is computed with the text around it: loading it saves next to nothing,
    and what follows it would be approximate.
    """

    namespace: Namespace
    """Of the chunks: the anchor they were captured behind, and how their KV is stored."""
    present: Callable[[Sequence[ChunkKey]], np.ndarray]
    """bool [len(keys)]: whose KV is stored (`Engine.present`)."""
    min_reuse_tokens: int

    def chunks(self, prompt: AssembledPrompt) -> tuple[list[PlannedChunk], list[str]]:
        """The prompt's chunks in their states, and the reason for each."""
        keys = [p.chunk.key for p in prompt.placements if p.length >= self.min_reuse_tokens]
        held = dict(zip(keys, self.present(keys), strict=True)) if keys else {}
        placed = [(self._state(p, held), p) for p in prompt.placements]
        chunks = [
            PlannedChunk(str(p.chunk.key), p.start, p.length, state, state == "stored" and self._exact(prompt, p))
            for (state, _), p in placed
        ]
        return chunks, [reason for (_, reason), _ in placed]

    def _state(self, placement: Placement, held: dict[ChunkKey, bool]) -> tuple[ChunkState, str]:
        if placement.length < self.min_reuse_tokens:
            return "computed", f"it has {placement.length} tokens; min_reuse_tokens is {self.min_reuse_tokens}"
        if not held[placement.chunk.key]:
            return "missing", "it has no stored KV"
        return "stored", "its KV is stored"

    def _exact(self, prompt: AssembledPrompt, placement: Placement) -> bool:
        """Whether the chunk stands behind the very tokens it was captured behind, and its KV was not rounded."""
        anchor_ids = self.namespace.anchor_ids
        if placement.start != len(anchor_ids) or self.namespace.kv_dtype != "auto":
            return False
        return prompt.token_ids[: placement.start] == anchor_ids


def all_computed(prompt: AssembledPrompt) -> tuple[list[PlannedChunk], list[str]]:
    """The prompt's chunks under a policy that reuses nothing, and the reason for each."""
    chunks = [PlannedChunk(str(p.chunk.key), p.start, p.length, "computed") for p in prompt.placements]
    return chunks, ["the policy reuses nothing"] * len(chunks)
