"""The laws once more in vLLM's compiled mode, which is what users run: its graph has no guards to protect it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.plan import ReusePlan
from tests.conftest import tiny_engine_options
from tests.parity.cases import Case, Layout, tokens
from tests.parity.engines import CHUNKS, ask, assert_same, difference
from tests.parity.fills import assert_a_decode_beside_fills_is_the_decode_alone
from tests.parity.laws import (
    THREE,
    assert_a_chunk_at_its_place_is_plain_prefill,
    assert_layer_0_is_plain_prefill,
    assert_ratio_one_is_plain_prefill,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


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
    assert_ratio_one_is_plain_prefill(compiled)


def test_reuse_then_plain_equals_cold(compiled: SpecCache) -> None:
    cold = ask(compiled, THREE, policy="full_recompute")
    assert difference(ask(compiled, THREE, policy="full_reuse"), cold) > 1e-2, "reuse is exact; this shows nothing"
    assert_same(ask(compiled, THREE, policy="full_recompute", cold=False), cold)


@pytest.mark.parametrize("policy", ["speccache", "cacheblend", "epic", "full_reuse"])
def test_layer_0_kv_equals_plain_prefill_under_any_policy(compiled: SpecCache, policy: str) -> None:
    assert_layer_0_is_plain_prefill(compiled, policy)


def test_one_chunk_at_its_captured_position_equals_plain_prefill(compiled: SpecCache) -> None:
    assert_a_chunk_at_its_place_is_plain_prefill(compiled)


def test_a_decode_beside_fills_is_the_decode_alone(compiled: SpecCache) -> None:
    """The step's hidden states become logits after the fill: nothing of it may be written where they live."""
    rng = np.random.default_rng(3)
    assert_a_decode_beside_fills_is_the_decode_alone(
        compiled, ReusePlan(tokens(rng, 40)), [Case(compiled, Layout((63, 40), 0.4, seed)).plan for seed in (1, 2, 3)]
    )
