"""The laws once more in vLLM's compiled mode, which is what users run: its graph has no guards to protect it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speccache_rag import SpecCache
from tests.conftest import tiny_engine_options
from tests.parity.engines import CHUNKS, ask, assert_kv_equal, assert_same, difference, prepared, prompt_of, written_kv

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

THREE = prompt_of(CHUNKS)


@pytest.fixture(scope="module")
def compiled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        store=str(tmp_path_factory.mktemp("store")),
        engine_options=tiny_engine_options(enforce_eager=False),
    ) as running:
        running.warm(CHUNKS, show_progress=False)
        yield running


def test_recompute_ratio_one_equals_plain_prefill(compiled: SpecCache) -> None:
    plain = ask(compiled, THREE, policy="full_recompute")
    assert_same(ask(compiled, THREE, recompute_ratio=1.0), plain)
    assert difference(ask(compiled, THREE, policy="full_reuse"), plain) > 1e-2, "reuse is exact; this shows nothing"
    assert_same(ask(compiled, THREE, policy="full_recompute", cold=False), plain)


@pytest.mark.parametrize("policy", ["speccache", "cacheblend", "epic", "full_reuse"])
def test_layer_0_kv_equals_plain_prefill_under_any_policy(compiled: SpecCache, policy: str) -> None:
    request = prepared(compiled, THREE, policy=policy, recompute_ratio=0.15).request
    reused, plain = (written_kv(compiled, request.prompt, s) for s in (request.selection, None))
    assert_kv_equal(reused, plain, layers=slice(0, 1))
