"""The oracle: selective recompute done slowly and obviously, for tests.

Every position goes through every layer with the model's own causal mask; then, in each layer, the keys and values of
reused positions are overwritten with the stored ones before attention sees them. What the reused positions' own queries
come to is thrown away by that same overwriting, one layer later. No mask, no scattering, no positions of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from speccache_rag.engines.transformers.cache import chunk_kv
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.types import ChunkKV


class OverwritingCache(DynamicCache):
    """A cache whose rows at `reused`, bool [T], are those of `stored`, whatever the model computes for them."""

    def __init__(self, stored: ChunkKV, reused: torch.Tensor) -> None:
        """`stored` covers the prompt from position 0; its rows outside `reused` are never read."""
        super().__init__()
        self._stored = stored
        self._reused = reused

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's keys and values [1, H, T, D], then put the stored rows over them."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        rows = torch.nonzero(self._reused).flatten()
        keys[0, :, rows] = self._stored.keys[layer_idx, rows].transpose(0, 1).to(keys)
        values[0, :, rows] = self._stored.values[layer_idx, rows].transpose(0, 1).to(values)
        return keys, values


def naive_prefill(
    target: TargetModel, token_ids: Sequence[int], stored: ChunkKV, reused: torch.Tensor
) -> tuple[ChunkKV, torch.Tensor]:
    """Prefill a prompt over stored KV: all its keys and values, and the logits [V] of its last token.

    Args:
        target: the model.
        token_ids: the prompt, T tokens.
        stored: KV of T tokens at position 0, keys moved to their places.
        reused: bool [T], False at the last position.
    """
    cache = OverwritingCache(stored, reused)
    logits = target.extend(token_ids, 0, cache)
    return chunk_kv(cache, tuple(token_ids)), logits
