"""Both engines under one name, for laws that hold in either."""

from __future__ import annotations

import os

import pytest

from speccache_rag import SpecCache
from tests.parity.engines import CHUNKS

# A test reaches into vLLM's worker process with a function of its own (vllm_kv.py).
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("tsc", id="transformers"),
        pytest.param("sc", id="vllm", marks=pytest.mark.vllm),
    ],
)
def engine_sc(request: pytest.FixtureRequest) -> SpecCache:
    """A running, warm SpecCache on each engine."""
    running: SpecCache = request.getfixturevalue(request.param)
    running.warm(CHUNKS, show_progress=False)
    return running
