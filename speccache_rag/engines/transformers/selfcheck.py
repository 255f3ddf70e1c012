"""The start-up self-check on Transformers: the probe is what the model's plain prefill leaves in a plain cache."""

from __future__ import annotations

import numpy as np

from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.reuse.selfcheck import probe_ids, prove
from speccache_rag.engines.transformers.cache import ReuseCache, chunk_kv
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.types import ChunkKV


def self_check(target: TargetModel) -> None:
    """Run the three proofs (engines/reuse/selfcheck.py).

    Raises:
        SelfCheckFailed: one of them failed; the message names which, the layer and the error.
    """
    token_ids = tuple(probe_ids(target.vocab_size, target.max_model_len))

    def recompute(positions: np.ndarray, *, over: ChunkKV | None = None, rope_offset: int = 0) -> ChunkKV:
        cache = ReuseCache(target.shape, len(token_ids))
        if over is not None:
            cache.write([Stretch(over, over.position, 0, len(token_ids))], target.rope)
        target.recompute(token_ids, positions, cache, rope_offset=rope_offset)
        return chunk_kv(cache, token_ids)

    cache, _ = target.prefill(token_ids)
    ropes = [target.rope] * target.shape.n_layers
    prove(chunk_kv(cache, token_ids), recompute, ropes, target.shape.dtype, target.max_model_len)
