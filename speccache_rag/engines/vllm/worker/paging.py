"""Positions in vLLM's paged KV cache, and the writing of stored KV there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.reuse.rope import RopeTable

MOVED_AT_ONCE = 1024
"""Tokens moved in one go: enough for few kernel launches, few enough for a small float32 copy of their keys."""


def slots_of(block_ids: Sequence[int], block_size: int, end: int) -> torch.Tensor:
    """int64 [end], on the CPU: the cache slot of each position of a request."""
    positions = torch.arange(end, dtype=torch.int64)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


class KVWriter:
    """Writes chunk KV with each attention layer's own update, which alone knows the backend's memory layout."""

    def __init__(
        self,
        layers: Mapping[str, Attention],
        ropes: Sequence[RopeTable | None],
        heads: slice,
        device: torch.device,
    ) -> None:
        """Take the loaded model.

        Args:
            layers: attention layers by name, in layer order.
            ropes: one rotation table a layer; layers that rotate alike share one object.
            heads: KV heads of the whole model that this rank holds.
            device: of the KV cache.
        """
        self._layers = list(layers.values())
        self._heads = heads
        self._device = device
        alike: dict[int, tuple[RopeTable, list[int]]] = {}
        for index, rope in enumerate(ropes):
            if rope is not None:
                alike.setdefault(id(rope), (rope, []))[1].append(index)
        self._rotations = list(alike.values())

    def write(self, stretches: Sequence[Stretch], slots: torch.Tensor) -> None:
        """Write stored tokens at their positions of one request; `slots` is indexed by position."""
        for batch in _batches(stretches, MOVED_AT_ONCE):
            self._write(batch, slots)

    def _write(self, batch: Sequence[Stretch], slots: torch.Tensor) -> None:
        keys = self._to_device([s.kv.keys[:, s.skip : s.length, self._heads] for s in batch])  # [L, T, H, D]
        values = self._to_device([s.kv.values[:, s.skip : s.length, self._heads] for s in batch])
        target = torch.cat([slots[s.start + s.skip : s.start + s.length] for s in batch])
        deltas = torch.cat([torch.full((s.n_tokens,), s.start - s.kv.position) for s in batch])
        if deltas.any():
            deltas = deltas.to(self._device)
            for rope, indices in self._rotations:
                every = len(indices) == len(self._layers)
                moved = rope.move(keys if every else keys[indices], deltas)
                keys = moved if every else keys.index_copy(0, torch.tensor(indices, device=self._device), moved)
        for index, layer in enumerate(self._layers):
            impl: Any = layer.impl  # support.py made sure that it has the method
            impl.do_kv_cache_update(layer, keys[index], values[index], layer.kv_cache, target)

    def _to_device(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(list(parts), dim=1)
        if self._device.type == "cuda":
            return whole.pin_memory().to(self._device, non_blocking=True)
        return whole.to(self._device)


def _batches(stretches: Sequence[Stretch], size: int) -> Iterator[list[Stretch]]:
    """The stretches in order, cut and packed into batches of at most `size` tokens."""
    batch: list[Stretch] = []
    room = size
    for stretch in stretches:
        skip = stretch.skip
        while skip < stretch.length:
            length = min(stretch.length, skip + room)
            batch.append(Stretch(stretch.kv, stretch.start, skip, length))
            room -= length - skip
            skip = length
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
