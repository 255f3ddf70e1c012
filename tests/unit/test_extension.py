from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.vllm.frontend import engine
from speccache_rag.engines.vllm.worker.extension import SpecCacheExtension


def test_the_worker_has_every_method_that_the_front_end_calls_by_name() -> None:
    called = set(re.findall(r'"(speccache_\w+)"', inspect.getsource(engine)))
    assert "speccache_attach" in called
    assert called <= set(dir(SpecCacheExtension))
