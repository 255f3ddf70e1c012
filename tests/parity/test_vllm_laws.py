"""The laws of reuse on stock vLLM (docs/architecture.md lists them)."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from speccache_rag import SpecCache
from speccache_rag.types import ChunkKey
from tests.parity.engines import (
    CHUNKS,
    ask,
    assert_kv_equal,
    assert_same,
    difference,
    prepared,
    prompt_of,
    written_kv,
)

pytestmark = pytest.mark.vllm

POLICIES = ("speccache", "random", "full_reuse")
THREE = prompt_of(CHUNKS)


@pytest.fixture(scope="module", autouse=True)
def warm(sc: SpecCache) -> None:
    sc.warm(CHUNKS, show_progress=False)


@pytest.mark.parametrize("policy", ["speccache", "random"])
@pytest.mark.parametrize("scoring", ["cached", "online"])
def test_recompute_ratio_one_equals_plain_prefill(sc: SpecCache, policy: str, scoring: str) -> None:
    plain = ask(sc, THREE, policy="full_recompute")
    ours = ask(sc, THREE, policy=policy, recompute_ratio=1.0, scoring=scoring)
    assert_same(ours, plain)
    assert ours.report.recomputed_tokens == ours.report.matched_tokens > 0
    assert plain.report.loaded_tokens == 0


def test_recompute_ratio_one_writes_the_kv_of_plain_prefill(sc: SpecCache) -> None:
    request = prepared(sc, THREE, recompute_ratio=1.0).request
    assert_kv_equal(written_kv(sc, request.prompt, request.selection), written_kv(sc, request.prompt, None))


@pytest.mark.parametrize("policy", POLICIES)
def test_layer_0_kv_equals_plain_prefill_under_any_policy(sc: SpecCache, policy: str) -> None:
    """It depends on token and position only, so it proves assembly, positions, store and recovery at once."""
    request = prepared(sc, THREE, policy=policy, recompute_ratio=0.15).request
    assert request.selection is not None
    assert len(request.selection.positions) < request.prompt.n_chunk_tokens
    reused, plain = written_kv(sc, request.prompt, request.selection), written_kv(sc, request.prompt, None)
    assert_kv_equal(reused, plain, layers=slice(0, 1))
    # The deeper layers are approximate, or the test would show nothing.
    assert (reused.values[1:] - plain.values[1:]).abs().max() > 1e-2


def test_one_chunk_at_its_captured_position_equals_plain_prefill(sc: SpecCache) -> None:
    header = sc._open().tokenizer.header()
    prompt = header + CHUNKS[0] + "\n\nQuestion: when was the mill built?"
    plain = ask(sc, prompt, policy="full_recompute")
    ours = ask(sc, prompt, policy="full_reuse")
    assert_same(ours, plain)
    assert ours.report.loaded_tokens == ours.report.matched_tokens > 0


def test_reuse_then_plain_equals_cold(sc: SpecCache) -> None:
    """Approximate KV must never be found by an exact request in vLLM's prefix cache."""
    cold = ask(sc, THREE, policy="full_recompute")
    reused = ask(sc, THREE, policy="full_reuse")
    assert difference(reused, cold) > 1e-2, "reuse is exact here, so the law would show nothing"
    after = ask(sc, THREE, policy="full_recompute", cold=False)
    assert_same(after, cold)


def test_exact_repeat_hits_its_own_prefix_cache_and_answers_the_same(sc: SpecCache) -> None:
    first = ask(sc, THREE)
    again = ask(sc, THREE, cold=False)
    assert_same(again, first)
    assert again.report.cached_tokens > 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_permutations_reuse_all_chunks(sc: SpecCache, order: tuple[int, ...]) -> None:
    answer = ask(sc, prompt_of([CHUNKS[i] for i in order]), policy="full_reuse")
    assert answer.report.chunks_reused == 3
    assert answer.report.loaded_tokens == answer.report.matched_tokens
    assert answer.report.missed_tokens == 0


def test_a_prompt_with_the_same_chunk_twice(sc: SpecCache) -> None:
    prompt = prompt_of([CHUNKS[0], CHUNKS[1], CHUNKS[0]])
    exact = ask(sc, prompt, recompute_ratio=1.0)
    assert_same(exact, ask(sc, prompt, policy="full_recompute"))
    reused = ask(sc, prompt, policy="full_reuse")
    assert reused.report.chunks_reused == 3
    request = prepared(sc, prompt, policy="full_reuse").request
    assert_kv_equal(
        written_kv(sc, request.prompt, request.selection), written_kv(sc, request.prompt, None), layers=slice(0, 1)
    )


def test_a_prompt_that_ends_inside_its_last_chunk(sc: SpecCache) -> None:
    prompt = sc._open().tokenizer.header() + CHUNKS[0] + "\n" + CHUNKS[1]
    assert_same(ask(sc, prompt, recompute_ratio=1.0), ask(sc, prompt, policy="full_recompute"))
    reused = ask(sc, prompt, policy="full_reuse")
    assert reused.report.loaded_tokens == reused.report.matched_tokens - 1
    assert reused.report.recomputed_tokens == 1, "vLLM needs one prompt token to compute"


def test_a_missing_chunk_is_recomputed_the_others_reused_and_it_comes_back(sc: SpecCache) -> None:
    key = _key(sc, CHUNKS[0])
    disk = sc._open().engine._disk  # type: ignore[attr-defined]
    assert disk.delete(key)
    answer = ask(sc, THREE, policy="full_reuse")
    assert answer.report.missed_keys == (key,)
    assert answer.report.chunks_reused == 2
    assert answer.report.missed_tokens > 0
    assert answer.report.loaded_tokens + answer.report.missed_tokens == answer.report.matched_tokens
    _wait_until(lambda: disk.contains(key))
    assert ask(sc, THREE, policy="full_reuse").report.chunks_reused == 3


@pytest.mark.parametrize("damage", ["vanished", "corrupt"])
def test_a_chunk_lost_after_the_request_was_planned_is_a_hole_not_an_error(sc: SpecCache, damage: str) -> None:
    """The worker finds it missing; its tokens are recomputed in the same job, exactly as if it had been unknown."""
    host, key = sc._open(), _key(sc, CHUNKS[0])
    disk = host.engine._disk  # type: ignore[attr-defined]
    request = prepared(sc, THREE, policy="full_reuse", recompute_ratio=0.0)
    if damage == "vanished":
        disk.delete(key)
    else:
        file = disk._file(key)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    sc.reset_prefix_cache()
    answer = next(d.completion for d in host.loop.iterate(lambda: sc._deltas(request)) if d.completion)
    assert answer.report.missed_keys == (key,)
    assert answer.report.chunks_reused == 2
    _wait_until(lambda: disk.contains(key))
    first = request.prompt.placements[0]
    # The hole is the first chunk: nothing approximate is before it, so its KV is exact in every layer.
    disk.delete(key)
    reused, plain = (written_kv(sc, request.prompt, s) for s in (request.request.selection, None))
    for ours, theirs in ((reused.keys, plain.keys), (reused.values, plain.values)):
        np.testing.assert_allclose(ours[:, : first.end], theirs[:, : first.end], atol=2e-4)
    sc.warm(CHUNKS, show_progress=False)


@pytest.mark.parametrize("policy", [*POLICIES, "full_recompute"])
@pytest.mark.parametrize("cold", [True, False])
def test_report_adds_up_to_the_prompt(sc: SpecCache, policy: str, cold: bool) -> None:
    report = ask(sc, THREE, policy=policy, recompute_ratio=0.3, cold=cold).report
    parts = ("cached", "loaded", "recomputed", "missed", "fresh")
    assert sum(getattr(report, f"{part}_tokens") for part in parts) == report.prompt_tokens
    seconds = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert seconds == pytest.approx(report.ttft_s, abs=1e-3)


def test_a_cut_chunk_is_reused_up_to_the_cut(sc: SpecCache) -> None:
    cut = CHUNKS[0][: len(CHUNKS[0]) * 2 // 3]
    prompt = prompt_of([cut, CHUNKS[1]])
    answer = ask(sc, prompt, policy="full_reuse")
    assert answer.report.chunks_reused == 2
    assert_same(ask(sc, prompt, recompute_ratio=1.0), ask(sc, prompt, policy="full_recompute"))


def test_mixed_concurrent_requests_equal_the_same_requests_alone(sc: SpecCache) -> None:
    import asyncio

    asks = [
        (prompt_of([CHUNKS[i], CHUNKS[j]]), policy)
        for (i, j), policy in itertools.product(itertools.permutations(range(3), 2), ("speccache", "full_recompute"))
    ]
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 8, "ignore_eos": True}
    alone = [ask(sc, prompt, policy=policy) for prompt, policy in asks]
    sc.reset_prefix_cache()

    async def together() -> list:
        return await asyncio.gather(*[sc.agenerate(prompt, policy=policy, **options) for prompt, policy in asks])

    for found, expected in zip(asyncio.run(together()), alone, strict=True):
        assert_same(found, expected)


def _key(sc: SpecCache, text: str) -> ChunkKey:
    return sc._library.chunk(text).key


def _wait_until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the missed chunk was not captured again"
        time.sleep(0.05)
