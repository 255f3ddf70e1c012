"""One vLLM engine for all LangChain tests with a model that really answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speccache_rag import SpecCache, SpecCacheConfig


@pytest.fixture(scope="session")
def config(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCacheConfig]:
    """Models of this configuration share one engine, however often the tests make a new one."""
    config = SpecCacheConfig(
        model=str(smollm2),
        speculative_model=str(smollm2),
        policy="speccache",
        store=str(tmp_path_factory.mktemp("store")),
        admission="first",
        engine_options={
            "dtype": "float32",  # many CPUs have no bfloat16 of their own
            "max_model_len": 2048,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 512 << 20,
        },
    )
    runtime = SpecCache.shared(config)  # a user of the engine until the end
    yield config
    runtime.close()
