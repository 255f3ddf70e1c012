"""The start-up self-check on vLLM: the probe is what vLLM's own runner prefilled and our recorder captured.

The proofs (engines/reuse/selfcheck.py) run on the real cache tensors, in blocks that nothing else uses yet.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.reuse.selfcheck import prove
from speccache_rag.engines.vllm.worker.paging import slots_of
from speccache_rag.engines.vllm.worker.ranks import all_heads
from speccache_rag.engines.vllm.worker.recorder import CaptureBuffer
from speccache_rag.engines.vllm.worker.sparse import paged
from speccache_rag.errors import SelfCheckFailed
from speccache_rag.types import ChunkKV

if TYPE_CHECKING:
    from speccache_rag.engines.vllm.worker.half import WorkerHalf


def self_check(worker: WorkerHalf, token_ids: list[int], max_model_len: int) -> None:
    """Run the three proofs.

    Raises:
        SelfCheckFailed: one of them failed; the message names which, the layer and the error.
    """
    probe = worker.captures.probe
    if probe is None or probe.token_ids != tuple(token_ids):
        raise SelfCheckFailed("The probe was not captured: the connector does not see vLLM's KV cache updates.")
    copies = itertools.count()

    def recompute(positions: np.ndarray, *, over: ChunkKV | None = None, rope_offset: int = 0) -> ChunkKV:
        return _recompute(worker, token_ids, positions, copy=next(copies), over=over, rope_offset=rope_offset)

    model = worker.model
    prove(probe, recompute, model.ropes, model.shape.dtype, max_model_len)


def _recompute(
    worker: WorkerHalf,
    token_ids: list[int],
    positions: np.ndarray,
    *,
    copy: int,
    over: ChunkKV | None = None,
    rope_offset: int = 0,
) -> ChunkKV:
    """Sparse-prefill `positions`; returns what was written, NaN where nothing was.

    Each `copy` has blocks of its own from the far end of the cache, which no request has touched yet.
    """
    n = len(token_ids)
    size = -(-n // worker.block_size)
    first = worker.num_blocks - size * (copy + 1)
    if first < 1:
        raise SelfCheckFailed(
            f"The KV cache has {worker.num_blocks} blocks; the self-check needs {size * 3 + 1}.",
            hint="Give vLLM more KV cache (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization).",
        )
    block_ids = list(range(first, first + size))
    slots = slots_of(block_ids, worker.block_size, n)
    model = worker.model
    if over is not None:
        model.writer.write([Stretch(over, over.position, 0, n)], slots.to(model.device))
    buffer = CaptureBuffer(token_ids, 0, len(model.layers))
    buffer.expect(slots)
    with model.recorder.watching([buffer.record]):
        model.prefill([(paged(token_ids, block_ids), positions)], rope_offset=rope_offset)
    own, heads = buffer.partial(), model.shape.n_heads
    return ChunkKV(all_heads(own.keys, heads), all_heads(own.values, heads), own.token_ids, own.position)
