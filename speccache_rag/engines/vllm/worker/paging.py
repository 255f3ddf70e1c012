"""Where positions live in vLLM's paged KV cache, and writing stored KV there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.types import ChunkKV


def slots_of(block_ids: Sequence[int], block_size: int, end: int, device: torch.device) -> torch.Tensor:
    """int64 [end]: the cache slot of each position of a request."""
    positions = torch.arange(end, dtype=torch.int64)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return (blocks[positions // block_size] * block_size + positions % block_size).to(device)


class KVWriter:
    """Writes chunk KV with each attention layer's own update, which alone knows the backend's memory layout."""

    def __init__(
        self, layers: Mapping[str, Attention], ropes: Sequence[RopeTable | None], device: torch.device
    ) -> None:
        self._layers = layers
        self._ropes = ropes
        self._device = device

    def write(self, kv: ChunkKV, slots: torch.Tensor, start: int, skip: int, length: int) -> None:
        """Write tokens `skip .. length - 1` of a chunk that begins at position `start` of the prompt.

        `slots` is indexed by prompt position.
        """
        target = slots[start + skip : start + length]
        delta = start - kv.position
        for index, layer in enumerate(self._layers.values()):
            rope = self._ropes[index]
            keys = kv.keys[index, skip:length].to(self._device)
            values = kv.values[index, skip:length].to(self._device)
            if rope is not None:
                keys = rope.move(keys, delta)
            impl: Any = layer.impl  # support.py made sure that it has the method
            impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), layer.kv_cache, target)
