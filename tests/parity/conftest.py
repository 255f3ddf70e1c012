"""One engine for all laws: a tiny random Llama in float32, small batches so that prefill and recompute are sliced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from speccache_rag import SpecCache


def engine_options(**overrides: object) -> dict[str, object]:
    """vLLM options for laws: exact arithmetic, quick start, batches smaller than the prompts."""
    return {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 256 << 20,
        "kv_cache_memory_bytes": 256 << 20,
        **overrides,
    }


@pytest.fixture(scope="session")
def sc(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A running SpecCache whose chunks are warm."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from speccache_rag import SpecCache
    from tests.parity.engines import CHUNKS

    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        store=str(tmp_path_factory.mktemp("store")),
        engine_options=engine_options(),
    ) as running:
        running.warm(CHUNKS, show_progress=False)
        yield running
