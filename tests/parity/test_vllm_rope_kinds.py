"""Scaled RoPE on vLLM: keys are recovered with the angles the loaded model itself uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speccache_rag import SpecCache
from tests.conftest import tiny_engine_options
from tests.parity.engines import CHUNKS, ask, assert_kv_equal, assert_same, difference, prepared, prompt_of, written_kv
from tests.tiny import tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

THREE = prompt_of(CHUNKS)


@pytest.fixture(scope="module", params=["llama3", "yarn"])
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A warm engine over a model whose RoPE frequencies are scaled; YaRN scales cosines and sines too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder: Path = tmp_path_factory.mktemp(request.param)
    with SpecCache(
        model=str(tiny_model(folder / "model", request.param)),
        policy="random",
        store=str(folder / "store"),
        engine_options=tiny_engine_options(),
    ) as running:
        running.warm(CHUNKS, show_progress=False)
        yield running


@pytest.mark.parametrize("policy", ["random", "full_reuse"])
def test_layer_0_kv_equals_plain_prefill(scaled: SpecCache, policy: str) -> None:
    request = prepared(scaled, THREE, policy=policy, recompute_ratio=0.15).request
    moved = [p.start - len(scaled._library.namespace.anchor_ids) for p in request.prompt.placements]
    assert max(moved) > 50, "no chunk was moved far, so recovery is hardly tested"
    reused, plain = (written_kv(scaled, request.prompt, s) for s in (request.selection, None))
    assert_kv_equal(reused, plain, layers=slice(0, 1))


def test_recompute_ratio_one_equals_plain_prefill(scaled: SpecCache) -> None:
    plain = ask(scaled, THREE, policy="full_recompute")
    assert_same(ask(scaled, THREE, recompute_ratio=1.0), plain)
    assert difference(ask(scaled, THREE, policy="full_reuse"), plain) > 1e-2, "reuse is exact; this shows nothing"
