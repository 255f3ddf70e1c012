"""An engine that does not start says why in its error, not in a log above it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speccache_rag import SpecCache
from speccache_rag.errors import EngineStartError
from tests.conftest import tiny_engine_options
from tests.integration.processes import ROOT, START_S

pytestmark = pytest.mark.vllm

START = """
from speccache_rag import SpecCache
if __name__ == "__main__":
    SpecCache(model={model!r}, policy="full_reuse", engine_options={options!r}).start()
"""


def test_a_kv_cache_too_small_for_the_context_is_told_in_numbers(tiny_folder: Path) -> None:
    options = tiny_engine_options(max_model_len=4096, kv_cache_memory_bytes=1 << 20)
    with (
        SpecCache(model=str(tiny_folder), policy="full_reuse", engine_options=options) as sc,
        pytest.raises(EngineStartError) as caught,
    ):
        sc.start()
    for part in ("max seq len (4096)", "GiB KV cache is needed", "Lower max_model_len", "kv_cache_memory_bytes"):
        assert part in str(caught.value)


def test_a_program_on_standard_input_is_told_that_it_must_be_a_file(tiny_folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-"],
        input=START.format(model=str(tiny_folder), options=tiny_engine_options()),
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "EngineStartError" in last
    assert "no file '<stdin>'" in last
    assert "Save a program" in last
