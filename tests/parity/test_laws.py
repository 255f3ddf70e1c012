"""The laws of reuse, the same for both engines (docs/architecture.md lists them)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from speccache_rag import SpecCache
from speccache_rag.types import ChunkKey
from tests.hosts import host_of, known
from tests.parity.engines import (
    CHUNKS,
    ask,
    assert_kv_equal,
    assert_same,
    first_tokens,
    plain,
    prompt_of,
    store_of,
    written_kv,
)
from tests.parity.laws import (
    THREE,
    assert_a_chunk_at_its_place_is_plain_prefill,
    assert_layer_0_is_plain_prefill,
    assert_ratio_one_is_plain_prefill,
)

POLICIES = ("speccache", "random", "full_reuse")


@pytest.mark.parametrize("policy", ["speccache", "random"])
@pytest.mark.parametrize("scoring", ["cached", "online"])
def test_recompute_ratio_one_equals_plain_prefill(engine_sc: SpecCache, policy: str, scoring: str) -> None:
    assert_ratio_one_is_plain_prefill(engine_sc, policy=policy, scoring=scoring)


@pytest.mark.parametrize("policy", POLICIES)
def test_layer_0_kv_equals_plain_prefill_under_any_policy(engine_sc: SpecCache, policy: str) -> None:
    assert_layer_0_is_plain_prefill(engine_sc, policy)


def test_one_chunk_at_its_captured_position_equals_plain_prefill(engine_sc: SpecCache) -> None:
    assert_a_chunk_at_its_place_is_plain_prefill(engine_sc)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_permutations_reuse_all_chunks(engine_sc: SpecCache, order: tuple[int, ...]) -> None:
    prompt = prompt_of([CHUNKS[i] for i in order])
    report = ask(engine_sc, prompt, policy="full_reuse").report
    assert report.chunks_reused == 3
    assert report.loaded_tokens == report.matched_tokens
    assert report.missed_tokens == 0
    assert_layer_0_is_plain_prefill(engine_sc, "full_reuse", prompt)


def test_a_prompt_with_the_same_chunk_twice(engine_sc: SpecCache) -> None:
    prompt = prompt_of([CHUNKS[0], CHUNKS[1], CHUNKS[0]])
    assert ask(engine_sc, prompt, policy="full_reuse").report.chunks_reused == 3
    assert_ratio_one_is_plain_prefill(engine_sc, prompt)
    assert_layer_0_is_plain_prefill(engine_sc, "full_reuse", prompt)


def test_a_prompt_that_ends_inside_its_last_chunk(engine_sc: SpecCache) -> None:
    prompt = host_of(engine_sc).tokenizer.header() + "Read this:\n" + CHUNKS[0] + "\n" + CHUNKS[1]
    assert_ratio_one_is_plain_prefill(engine_sc, prompt)
    report = ask(engine_sc, prompt, policy="full_reuse").report
    assert report.loaded_tokens == report.matched_tokens - 1
    assert report.recomputed_tokens == 1, "the last prompt token's logits are needed"


def test_a_cut_chunk_is_reused_up_to_the_cut(engine_sc: SpecCache) -> None:
    prompt = prompt_of([CHUNKS[0][: len(CHUNKS[0]) * 2 // 3], CHUNKS[1]])
    assert ask(engine_sc, prompt, policy="full_reuse").report.chunks_reused == 2
    assert_ratio_one_is_plain_prefill(engine_sc, prompt)


def test_a_missing_chunk_is_recomputed_the_others_reused_and_it_comes_back(engine_sc: SpecCache) -> None:
    key, store = _key(engine_sc, CHUNKS[0]), store_of(engine_sc)
    assert store.delete(key)
    report = ask(engine_sc, THREE, policy="full_reuse").report
    assert report.missed_keys == (key,)
    assert report.chunks_reused == 2
    assert report.missed_tokens > 0
    assert report.loaded_tokens + report.missed_tokens == report.matched_tokens
    _wait_until(lambda: store.contains(key))
    assert ask(engine_sc, THREE, policy="full_reuse").report.chunks_reused == 3


@pytest.mark.parametrize("damage", ["vanished", "corrupt", "other tokens"])
def test_a_chunk_lost_after_the_request_was_planned_is_a_hole_not_an_error(engine_sc: SpecCache, damage: str) -> None:
    """The engine finds it missing; its tokens are recomputed in the same job, exactly as if it had been unknown."""
    key, store = _key(engine_sc, CHUNKS[0]), store_of(engine_sc)
    plan = engine_sc.plan(THREE, policy="full_reuse", recompute_ratio=0.0)
    if damage == "corrupt":
        if hasattr(store, "_ram"):
            store._ram.delete(key)  # what is in RAM was verified before
        file = getattr(store, "_disk", store)._file(key)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        store.delete(key)
    if damage == "other tokens":
        store.put(key, store.get(_key(engine_sc, CHUNKS[1])))
    engine_sc.reset_prefix_cache()
    recaptured = engine_sc.stats()["recaptured"]
    answer = engine_sc.generate(plan, max_tokens=1)
    assert answer.report.missed_keys == (key,)
    assert answer.report.chunks_reused == 2
    assert answer.report.loaded_tokens + answer.report.missed_tokens == answer.report.matched_tokens
    _wait_until(lambda: engine_sc.stats()["recaptured"] > recaptured)
    # The hole is the first chunk: nothing approximate is before it, so its KV is exact in every layer.
    store.delete(key)
    end = plan.reuse.chunks[0].end
    reused, exact = (written_kv(engine_sc, reuse) for reuse in (plan.reuse, plain(plan.reuse)))
    assert_kv_equal(first_tokens(reused, end), first_tokens(exact, end))
    engine_sc.warm(CHUNKS, show_progress=False)


@pytest.mark.parametrize("policy", [*POLICIES, "full_recompute"])
@pytest.mark.parametrize("cold", [True, False])
def test_report_adds_up_to_the_prompt(engine_sc: SpecCache, policy: str, cold: bool) -> None:
    report = ask(engine_sc, THREE, policy=policy, recompute_ratio=0.3, cold=cold).report
    parts = ("cached", "loaded", "recomputed", "missed", "fresh")
    assert sum(getattr(report, f"{part}_tokens") for part in parts) == report.prompt_tokens
    seconds = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert seconds == pytest.approx(report.ttft_s, abs=1e-3)


def test_mixed_concurrent_requests_equal_the_same_requests_alone(engine_sc: SpecCache) -> None:
    asks = [
        (prompt_of([CHUNKS[i], CHUNKS[j]]), policy)
        for (i, j), policy in itertools.product(itertools.permutations(range(3), 2), ("speccache", "full_recompute"))
    ]
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 8, "ignore_eos": True}
    alone = [ask(engine_sc, prompt, policy=policy) for prompt, policy in asks]
    engine_sc.reset_prefix_cache()

    async def together() -> list[Any]:
        return await asyncio.gather(*[engine_sc.agenerate(prompt, policy=policy, **options) for prompt, policy in asks])

    for found, expected in zip(asyncio.run(together()), alone, strict=True):
        assert_same(found, expected)


def _key(sc: SpecCache, text: str) -> ChunkKey:
    return known(sc, text).key


def _wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the missed chunk was not captured again"
        time.sleep(0.02)
