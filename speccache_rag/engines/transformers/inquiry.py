"""Questions a selection policy asks of the model about a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import DynamicCache

from speccache_rag.engines.reuse.deviation import kv_deviation_of
from speccache_rag.engines.reuse.fill_job import fill_region
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.header import Header
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.prefill import region_of
from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import AssembledPrompt, ChunkKV, Selection


def kv_deviation(
    target: TargetModel, store: ChunkStore, prompt: AssembledPrompt, layer: int, of: Literal["value", "key"]
) -> np.ndarray:
    """float32 [T] (see engines.base.Engine): layers `0 .. layer` over the reuse region, no further."""
    cache = _Until(layer)
    try:
        target.extend(prompt.token_ids[: prompt.region_end], 0, cache)
    except _Enough as enough:
        true = enough.values if of == "value" else enough.keys
        region = region_of(prompt, Selection.nothing(prompt))
        return kv_deviation_of(true[0].transpose(0, 1).float(), region, store, target.rope, layer, of)
    raise AssertionError(f"the model never wrote layer {layer} into its cache")


def query_attention(
    target: TargetModel, store: ChunkStore, prompt: AssembledPrompt, layers: LayerRange, header: Header
) -> np.ndarray:
    """float32 [T] (see engines.base.Engine): chunks reused, the rest computed in one pass, its last rows watched."""
    cache = ReuseCache(target.shape, prompt.n_tokens)

    def write(kv: ChunkKV, start: int, skip: int, length: int) -> None:
        cache.write(kv, target.rope, start, skip, length)

    header_ids = prompt.token_ids[: prompt.placements[0].start if prompt.placements else 0]
    known = header.write(cache, target.rope, header_ids)
    region = replace(region_of(prompt, Selection.nothing(prompt)), computed=known)
    positions, _ = fill_region(region, store, write)
    rows = np.concatenate((positions, np.arange(region.end, prompt.n_tokens)))
    most = target.attend(prompt.token_ids, rows, cache, region.end, counted_layers(target.shape.n_layers, layers))
    header.keep(cache, header_ids)
    found: np.ndarray = most.mean(dim=0).cpu().numpy()
    return found


class _Enough(Exception):
    """Carries one layer's fresh keys and values [1, H, T, D] out of a forward pass that has gone far enough."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


class _Until(DynamicCache):
    """Ends the forward pass where layer `layer` writes its keys and values."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == self._layer:
            raise _Enough(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
