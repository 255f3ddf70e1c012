"""The answer to `KVDeviation`: how far stored KV is from that of a full prefill, in one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from speccache_rag.engines.reuse.deviation import kv_deviation_of
from speccache_rag.engines.vllm.worker.ranks import sum_over_ranks
from speccache_rag.engines.vllm.worker.sparse import StopForward
from speccache_rag.scoring.questions import KVDeviation

if TYPE_CHECKING:
    from speccache_rag.engines.vllm.worker.fills import RunningFill
    from speccache_rag.engines.vllm.worker.model import LoadedModel


def kv_deviation(model: LoadedModel, fill: RunningFill, question: KVDeviation) -> np.ndarray:
    """float32 [T]. Runs the model over the reuse region, up to where the layer has its keys and values."""
    fresh: list[torch.Tensor] = []

    def sink(index: int, keys: torch.Tensor, values: torch.Tensor, _slots: torch.Tensor) -> None:
        if index == question.layer:
            fresh.append((values if question.of == "value" else keys).float())
            raise StopForward

    with model.recorder.watching([sink]):
        model.prefill([(fill.prompt, np.arange(fill.job.plan.region_end))])
    true = torch.cat(fresh)  # batches follow each other in position order
    rope = model.ropes[question.layer]
    found = kv_deviation_of(true, fill.job.plan, fill.job.kv, rope, question.layer, question.of, model.heads)
    return sum_over_ranks(found).numpy()
