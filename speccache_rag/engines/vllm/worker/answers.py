"""Questions a selection policy asks of the target model about a prompt, answered inside vLLM's worker.

An inquiry is a request of its own under a salt of its own: its blocks serve as scratch memory, and what is left in them
is never found again. Answers come from stored chunk KV and vLLM's own forward (sparse.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from speccache_rag.engines.reuse.attention import attention_on_keys
from speccache_rag.engines.reuse.deviation import kv_deviation_of
from speccache_rag.engines.reuse.fill_job import Region, fill_region
from speccache_rag.engines.vllm.worker.paging import slots_of
from speccache_rag.engines.vllm.worker.recorder import CaptureBuffer
from speccache_rag.engines.vllm.worker.sparse import StopForward
from speccache_rag.scoring.layers import LayerRange, counted_layers
from speccache_rag.types import ChunkKV

if TYPE_CHECKING:
    from speccache_rag.engines.vllm.messages import ReuseJob
    from speccache_rag.engines.vllm.worker.half import WorkerHalf


def answer(worker: WorkerHalf, job: ReuseJob) -> np.ndarray:
    """float32 [T]: what the job's inquiry asks."""
    inquiry = job.plan.inquiry
    assert inquiry is not None
    if inquiry.kind == "kv_deviation":
        return _kv_deviation(worker, job, inquiry.layer, inquiry.of)
    return _query_attention(worker, job, inquiry.layers)


def _kv_deviation(worker: WorkerHalf, job: ReuseJob, layer: int, of: Literal["value", "key"]) -> np.ndarray:
    """Runs the model over the reuse region, up to where layer `layer` has its keys and values."""
    end = job.plan.region_end
    slots = slots_of(job.block_ids, worker.block_size, end, worker.device)
    fresh: list[torch.Tensor] = []

    def sink(index: int, keys: torch.Tensor, values: torch.Tensor, _slots: torch.Tensor) -> None:
        if index == layer:
            fresh.append((values if of == "value" else keys).float().cpu())
            raise StopForward

    with worker.recorder.watching([sink]):
        worker.prefill(job.token_ids, np.arange(end), job.block_ids, slots)
    true = torch.cat(fresh)  # batches follow each other in position order
    region = Region(job.token_ids, job.plan.chunks, (), end, end)
    return kv_deviation_of(true, region, worker.store, worker.ropes[layer], layer, of)


def _query_attention(worker: WorkerHalf, job: ReuseJob, layers: LayerRange) -> np.ndarray:
    """Loads all chunks, computes what is in none, and watches what the query attends to."""
    n = len(job.token_ids)
    end = min(job.plan.region_end, n - 1)
    slots = slots_of(job.block_ids, worker.block_size, n, worker.device)
    keys = CaptureBuffer(job.token_ids, 0, len(worker.layers))
    keys.expect(slots)

    def write(kv: ChunkKV, start: int, skip: int, length: int) -> None:
        worker.writer.write(kv, slots, start, skip, length)

    with worker.recorder.watching([keys.record]), _queries(worker, layers) as queries:
        positions, _ = fill_region(Region(job.token_ids, job.plan.chunks, (), end, end), worker.store, write)
        worker.prefill(job.token_ids, positions, job.block_ids, slots)
        for rows in queries.values():
            rows.clear()  # those of fresh tokens between chunks
        worker.prefill(job.token_ids, np.arange(end, n), job.block_ids, slots)
    cached = keys.chunk_kv().keys
    most = torch.zeros(n - end, n)
    for index, rows in queries.items():
        impl: Any = list(worker.layers.values())[index].impl
        soft_cap = getattr(impl, "logits_soft_cap", None)
        attention = attention_on_keys(torch.cat(rows), cached[index], float(impl.scale), end, soft_cap)
        most = torch.maximum(most, attention)
    return most.mean(dim=0).numpy()


@contextmanager
def _queries(worker: WorkerHalf, layers: LayerRange) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Collects the queries [rows, Hq, D] that reach the attention of the counted layers, by layer index.

    Like `KVRecorder`, an instance attribute in front of the backend's own method, for the time of the `with`.
    """
    impls: list[Any] = [layer.impl for layer in worker.layers.values()]
    counted = counted_layers(len(impls), layers)
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in counted}

    def tap(index: int, forward: Any) -> Any:
        def tapped(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows[index].append(query.float().cpu())
            return forward(layer, query, *args, **kwargs)

        return tapped

    for index in counted:
        impls[index].forward = tap(index, impls[index].forward)
    try:
        yield rows
    finally:
        for index in counted:
            del impls[index].forward
