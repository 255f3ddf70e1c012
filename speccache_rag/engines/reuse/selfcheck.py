"""The start-up self-check: reuse must equal prefill on this model and machine, or the engine refuses to run.

The reference is a probe that the engine's ordinary prefill computed. Against it, three things are shown for every
layer:

1. Sparse prefill of all tokens writes the keys and values that ordinary prefill wrote (catches input, mask and metadata
   mistakes, such as int64 ids in a compiled graph).
2. A written chunk attends like a prefilled one: tokens recomputed over it get ordinary prefill's keys and values.
3. A recovered key is the key prefilled at that position, at the farthest distance the model allows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.errors import SelfCheckFailed
from speccache_rag.types import ChunkKV

PROBE_TOKENS = 48
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest relative L2 error of a layer's keys or values. Mistakes this check is for give 0.3 and more."""


class Recompute(Protocol):
    """An engine's sparse prefill of the probe, into fresh memory."""

    def __call__(self, positions: np.ndarray, *, over: ChunkKV | None = None, rope_offset: int = 0) -> ChunkKV:
        """Compute `positions` (sorted, unique); returns what was written, anything elsewhere.

        `over` is written first, as stored KV would be; `rope_offset` shifts only the angles of RoPE.
        """
        ...


def probe_ids(vocab_size: int, max_model_len: int) -> list[int]:
    """The probe's tokens, always the same for a model."""
    # Ordinary tokens are the low ids in every vocabulary; special ones come last.
    high = max(2, vocab_size // 2)
    generator = random.Random(0)
    return [generator.randrange(1, high) for _ in range(min(PROBE_TOKENS, max_model_len - 2))]


def prove(
    probe: ChunkKV, recompute: Recompute, ropes: Sequence[RopeTable | None], dtype: torch.dtype, max_model_len: int
) -> None:
    """Run the three proofs against `probe`, which was prefilled at position 0; `ropes` has one table a layer.

    Raises:
        SelfCheckFailed: one of them failed; the message names which, the layer and the error.
    """
    n = probe.n_tokens
    everything = np.arange(n)

    written = recompute(everything)
    _compare("Sparse prefill", written.keys, probe.keys, dtype)
    _compare("Sparse prefill", written.values, probe.values, dtype)

    scattered = np.unique(np.concatenate((np.arange(3, 5), [n // 2], np.arange(n - 9, n))))
    over = recompute(scattered, over=probe)
    _compare("Recompute over a written chunk", over.keys[:, scattered], probe.keys[:, scattered], dtype)
    _compare("Recompute over a written chunk", over.values[:, scattered], probe.values[:, scattered], dtype)

    limits = [rope.limit for rope in ropes if rope is not None]
    delta = min([max_model_len, *limits]) - n - 1
    far = recompute(everything, rope_offset=delta)
    moved = [_moved(probe.keys[layer], rope, delta) for layer, rope in enumerate(ropes)]
    _compare(f"Positional recovery by {delta}", torch.stack(moved), far.keys, dtype)


def _moved(keys: torch.Tensor, rope: RopeTable | None, delta: int) -> torch.Tensor:
    return keys if rope is None else rope.move(keys.to(rope.cos.device), delta).to(keys.device)


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Both [L, T, H, D]."""
    found, expected = found.float().cpu(), expected.float().cpu()
    difference = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    limit = TOLERANCE[dtype]
    # Written so that NaN fails too.
    bad = torch.nonzero(~(difference <= limit)).flatten()
    if len(bad):
        layer = int(bad[0])
        raise SelfCheckFailed(
            f"{what} differs from the engine's ordinary prefill: relative error {float(difference[layer]):.3g} in "
            f"layer {layer} of {len(difference)} ({len(bad)} layers over the limit {limit:g})."
        )
