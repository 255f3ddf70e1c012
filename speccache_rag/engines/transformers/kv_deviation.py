"""The answer to `KVDeviation`: how far stored KV is from that of a full prefill, in one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from speccache_rag.engines.reuse.deviation import kv_deviation_of
from speccache_rag.engines.reuse.fill import FillJob
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.scoring.questions import KVDeviation
from speccache_rag.store.base import ChunkStore


def kv_deviation(target: TargetModel, store: ChunkStore, plan: ReusePlan, question: KVDeviation) -> np.ndarray:
    """float32 [T]. Runs layers `0 .. question.layer` over the reuse region, no further."""
    cache = StoppingCache(question.layer)
    try:
        target.extend(plan.token_ids[: plan.region_end], 0, cache)
    except LayerReached as reached:
        true = reached.values if question.of == "value" else reached.keys
        rows = true[0].transpose(0, 1).float()
        job = FillJob(plan, store, target.shape)
        job.decide(job.load())
        return kv_deviation_of(rows, plan, job.kv, target.rope, question.layer, question.of).numpy()
    raise AssertionError(f"the model never wrote layer {question.layer} into its cache")


class LayerReached(Exception):
    """Carries one layer's fresh keys and values [1, H, T, D] out of a forward pass, and ends it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


class StoppingCache(DynamicCache):
    """Ends the forward pass where layer `layer` writes its keys and values."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == self._layer:
            raise LayerReached(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
