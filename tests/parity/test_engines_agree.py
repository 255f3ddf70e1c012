"""The two engines answer alike, and each can serve from what the other stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speccache_rag import SpecCache
from speccache_rag.store.factory import build_store
from tests.hosts import known
from tests.parity.engines import (
    CHUNKS,
    ENGINES_ATOL,
    ask,
    assert_kv_equal,
    assert_same,
    difference,
    written_kv,
)
from tests.parity.laws import THREE

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def other(sc: SpecCache, tiny_folder: Path) -> Iterator[SpecCache]:
    """The Transformers engine on the store that vLLM warmed."""
    sc.warm(CHUNKS, show_progress=False)
    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        engine="transformers",
        store=sc.config.store,
        engine_options={"device": "cpu", "dtype": "float32", "max_model_len": sc.max_model_len},
    ) as running:
        yield running


@pytest.mark.parametrize("policy", ["full_recompute", "full_reuse", "speccache", "random"])
def test_the_engines_give_the_same_logprobs_from_the_same_stored_kv(
    sc: SpecCache, other: SpecCache, policy: str
) -> None:
    ours, theirs = ask(other, THREE, policy=policy), ask(sc, THREE, policy=policy)
    assert_same(ours, theirs, atol=ENGINES_ATOL)
    for name in ("matched_tokens", "loaded_tokens", "recomputed_tokens", "missed_tokens", "fresh_tokens"):
        assert getattr(ours.report, name) == getattr(theirs.report, name), name
    if policy != "full_recompute":
        assert ours.report.chunks_reused == 3
        assert difference(ours, ask(other, THREE, policy="full_recompute")) > 10 * ENGINES_ATOL, "reuse is exact here"


def test_the_engines_write_the_same_kv(sc: SpecCache, other: SpecCache) -> None:
    plan = sc.plan(THREE, policy="random", recompute_ratio=0.3).reuse
    assert_kv_equal(written_kv(other, plan), written_kv(sc, plan), atol=ENGINES_ATOL)


def test_a_chunk_has_the_same_key_and_kv_whoever_captured_it(sc: SpecCache, other: SpecCache, tsc: SpecCache) -> None:
    """Keys name what KV depends on, and the engine is not part of that: either may serve what the other stored."""
    assert tsc.warm(CHUNKS, show_progress=False).n_texts == len(CHUNKS)
    assert other.warm(CHUNKS, show_progress=False).n_captured == 0, "vLLM's captures were not recognised"
    with build_store({"path": sc.config.store}) as vllm_store, build_store({"path": tsc.config.store}) as own_store:
        for text in CHUNKS:
            key = known(sc, text).key
            assert known(tsc, text).key == key
            theirs, ours = vllm_store.get(key), own_store.get(key)
            assert theirs is not None and ours is not None
            assert (ours.token_ids, ours.position) == (theirs.token_ids, theirs.position)
            assert_kv_equal(ours, theirs, atol=ENGINES_ATOL)
