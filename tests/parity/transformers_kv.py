"""The KV a request leaves in the Transformers engine's cache."""

from __future__ import annotations

from speccache_rag import SpecCache
from speccache_rag.engines.base import EngineRequest
from speccache_rag.engines.transformers.cache import chunk_kv
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.prefill import prefill
from speccache_rag.types import AssembledPrompt, ChunkKV, Selection


def engine_of(sc: SpecCache) -> TransformersEngine:
    """The running engine."""
    engine = sc._open().engine
    assert isinstance(engine, TransformersEngine)
    return engine


def written_kv(sc: SpecCache, prompt: AssembledPrompt, selection: Selection | None) -> ChunkKV:
    """All keys and values after a request's prefill, [L, T, H, D]."""
    engine = engine_of(sc)
    prefilled = prefill(engine._alive(), engine._store, EngineRequest(prompt, selection))
    return chunk_kv(prefilled.cache, prompt.token_ids)
