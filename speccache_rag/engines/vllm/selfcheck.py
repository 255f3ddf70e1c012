"""The start-up self-check: reuse must equal prefill on this model, backend and version, or the engine refuses to run.

The reference is a probe that vLLM's own runner prefilled and our recorder captured. Against it, on blocks that nothing
else uses yet, three things are shown for every layer:

1. Sparse prefill of all tokens writes the keys and values the runner wrote (catches input and metadata mistakes, such
   as int64 ids in compiled mode).
2. A written chunk attends like a prefilled one: tokens recomputed over it get the runner's keys and values.
3. A recovered key is the key prefilled at that position, at the farthest distance the model allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from speccache_rag.engines.vllm.paging import slots_of
from speccache_rag.engines.vllm.recorder import CaptureBuffer
from speccache_rag.errors import SelfCheckFailed
from speccache_rag.types import ChunkKV

if TYPE_CHECKING:
    from speccache_rag.engines.vllm.worker import WorkerHalf

PROBE_TOKENS = 48
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative L2 error of a layer's keys or values. Mistakes this check is for give 0.3 and more."""


def self_check(worker: WorkerHalf, token_ids: list[int], max_model_len: int) -> None:
    """Run the three proofs.

    Raises:
        SelfCheckFailed: one of them failed; the message names which, the layer and the error.
    """
    probe = worker.probe
    if probe is None or probe.token_ids != tuple(token_ids):
        raise SelfCheckFailed("The probe was not captured: the connector does not see vLLM's KV cache updates.")
    n = len(token_ids)
    everything = np.arange(n)

    written = _recompute(worker, token_ids, everything, copy=0)
    _compare("Sparse prefill", written.keys, probe.keys, worker)
    _compare("Sparse prefill", written.values, probe.values, worker)

    scattered = np.concatenate((np.arange(3, 5), np.arange(n // 2, n // 2 + 1), np.arange(n - 9, n)))
    over = _recompute(worker, token_ids, scattered, copy=1, reuse=probe)
    _compare("Recompute over a written chunk", over.keys[:, scattered], probe.keys[:, scattered], worker)
    _compare("Recompute over a written chunk", over.values[:, scattered], probe.values[:, scattered], worker)

    limits = [rope.limit for rope in worker.ropes if rope is not None]
    delta = min([max_model_len, *limits]) - n - 1
    far = _recompute(worker, token_ids, everything, copy=2, rope_offset=delta)
    moved = [probe.keys[i] if rope is None else rope.move(probe.keys[i], delta) for i, rope in enumerate(worker.ropes)]
    _compare(f"Positional recovery by {delta}", torch.stack(moved), far.keys, worker)


def _recompute(
    worker: WorkerHalf,
    token_ids: list[int],
    positions: np.ndarray,
    *,
    copy: int,
    reuse: ChunkKV | None = None,
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
    slots = slots_of(block_ids, worker.block_size, n, worker.device)
    if reuse is not None:
        worker.writer.write(reuse, slots, reuse.position, 0, n)
    buffer = CaptureBuffer(token_ids, 0, len(worker.layers))
    buffer.expect(slots)
    worker.recorder.attach([buffer.record])
    try:
        worker.prefill(token_ids, positions, block_ids, slots, rope_offset=rope_offset)
    finally:
        worker.recorder.detach()
    return buffer.partial()


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, worker: WorkerHalf) -> None:
    """Both [L, T, H, D]."""
    found, expected = found.float().cpu(), expected.float().cpu()
    difference = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    limit = TOLERANCE[worker.dtype]
    # Written so that NaN fails too.
    bad = torch.nonzero(~(difference <= limit)).flatten()
    if len(bad):
        layer = int(bad[0])
        raise SelfCheckFailed(
            f"{what} differs from vLLM's own prefill: relative error {float(difference[layer]):.3g} in layer {layer} "
            f"of {len(difference)} ({len(bad)} layers over the limit {limit:g})."
        )
