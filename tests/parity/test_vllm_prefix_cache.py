"""What a reuse request or an inquiry leaves in vLLM's prefix cache is found by its own kind only."""

from __future__ import annotations

import pytest

from speccache_rag import SpecCache
from speccache_rag.scoring.questions import KVDeviation
from tests.parity.engines import CHUNKS, answer_to, ask, assert_same, difference
from tests.parity.laws import THREE

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def warm(sc: SpecCache) -> None:
    sc.warm(CHUNKS, show_progress=False)


def test_reuse_then_plain_equals_cold(sc: SpecCache) -> None:
    """Approximate KV must never be found by an exact request in vLLM's prefix cache."""
    cold = ask(sc, THREE, policy="full_recompute")
    reused = ask(sc, THREE, policy="full_reuse")
    assert difference(reused, cold) > 1e-2, "reuse is exact here, so the law would show nothing"
    assert_same(ask(sc, THREE, policy="full_recompute", cold=False), cold)


def test_exact_repeat_hits_its_own_prefix_cache_and_answers_the_same(sc: SpecCache) -> None:
    first = ask(sc, THREE)
    again = ask(sc, THREE, cold=False)
    assert_same(again, first)
    assert again.report.cached_tokens > 0


def test_plans_of_one_prompt_that_recompute_differently_do_not_share(sc: SpecCache) -> None:
    plain = ask(sc, THREE, policy="full_recompute")
    reused = ask(sc, THREE, policy="full_reuse")
    assert difference(reused, plain) > 1e-2, "reuse is exact here, so the law would show nothing"
    assert_same(ask(sc, THREE, recompute_ratio=1.0, cold=False), plain)


def test_reuse_does_not_find_what_an_inquiry_left(sc: SpecCache) -> None:
    """An inquiry has the chunks and the selection of full reuse, and leaves exact KV in its scratch memory."""
    reused = ask(sc, THREE, policy="full_reuse")
    assert difference(reused, ask(sc, THREE, policy="full_recompute")) > 1e-2
    sc.reset_prefix_cache()
    answer_to(sc, sc.plan(THREE, policy="full_reuse").reuse, KVDeviation(layer=3))
    assert_same(ask(sc, THREE, policy="full_reuse", cold=False), reused)
