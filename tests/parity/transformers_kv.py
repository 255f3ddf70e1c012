"""The KV a request leaves in the Transformers engine's cache."""

from __future__ import annotations

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.cache import chunk_kv
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.prefill import prefill
from speccache_rag.types import ChunkKV
from tests.hosts import host_of


def engine_of(sc: SpecCache) -> TransformersEngine:
    """The running engine."""
    engine = host_of(sc).engine
    assert isinstance(engine, TransformersEngine)
    return engine


def written_kv(sc: SpecCache, plan: ReusePlan) -> ChunkKV:
    """All keys and values after a prompt's prefill, [L, T, H, D]."""
    engine = engine_of(sc)
    prefilled = prefill(engine._alive(), engine._store, plan)
    return chunk_kv(prefilled.cache, plan.token_ids)
