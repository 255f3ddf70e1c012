"""The one cache of this engine: full-length keys and values, into which a sparse forward pass scatters its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache

from speccache_rag.engines.reuse.fill import KVShape, Stretch
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.types import ChunkKV


@dataclass(frozen=True, slots=True)
class CacheShape(KVShape):
    """What one token's KV looks like in every layer, and where it lives."""

    device: torch.device


class ReuseCache(DynamicCache):
    """The KV of a prompt's reuse region, at first zero.

    `write` puts stored KV in its place. While `scattering` over positions, `update` takes the rows a layer computed for
    them, puts them in their place and gives the layer everything, so that its queries meet fresh and reused keys alike.
    After that it grows at its end, as any `DynamicCache` does.
    """

    def __init__(self, shape: CacheShape, length: int) -> None:
        size = (1, shape.n_heads, length, shape.head_dim)
        # Zero, not empty: rows that are not written yet are masked, but a NaN would pass through the mask.
        zeros = partial(torch.zeros, size, dtype=shape.dtype, device=shape.device)
        super().__init__([(zeros(), zeros()) for _ in range(shape.n_layers)])
        self._positions: torch.Tensor | None = None

    def write(self, stretches: Sequence[Stretch], rope: RopeTable) -> None:
        """Write stored tokens at their positions of the prompt."""
        for stretch in stretches:
            kv, chosen = stretch.kv, slice(stretch.skip, stretch.length)
            here = slice(stretch.start + stretch.skip, stretch.start + stretch.length)
            for index in range(len(self.layers)):
                keys, values = layer_kv(self, index)
                moved = rope.move(kv.keys[index, chosen].to(keys.device), stretch.start - kv.position)
                # Stored rows are [T, H, D], the cache's are [1, H, T, D].
                keys[0, :, here] = moved.transpose(0, 1)
                values[0, :, here] = kv.values[index, chosen].to(values.device).transpose(0, 1)

    @contextmanager
    def scattering(self, positions: torch.Tensor) -> Iterator[None]:
        """Rows of the forward passes inside belong to `positions`, int64 [S]."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's fresh keys and values [1, H, S, D]; returns all it attends to, [1, H, T, D]."""
        if self._positions is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        keys, values = layer_kv(self, layer_idx)
        keys.index_copy_(2, self._positions, key_states)
        values.index_copy_(2, self._positions, value_states)
        return keys, values


def layer_kv(cache: Cache, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's keys and values, [1, H, T, D] each."""
    layer: Any = cache.layers[index]  # recurrent layers, which would have neither, are refused (support.py)
    return layer.keys, layer.values


def chunk_kv(cache: Cache, token_ids: tuple[int, ...], start: int = 0) -> ChunkKV:
    """The KV of `token_ids`, which stand at `start` in a cache, on the CPU."""
    here = slice(start, start + len(token_ids))
    layers = [layer_kv(cache, index) for index in range(len(cache.layers))]
    keys, values = (
        torch.stack([t[0, :, here].transpose(0, 1).cpu() for t in kind]) for kind in zip(*layers, strict=True)
    )
    return ChunkKV(keys, values, token_ids, start)
