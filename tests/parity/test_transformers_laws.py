"""The laws of reuse on the Transformers engine (docs/architecture.md lists them). No vLLM needed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speccache_rag import SpecCache
from speccache_rag.types import ChunkKey
from tests.parity.engines import (
    CHUNKS,
    KV_ATOL,
    ask,
    assert_kv_equal,
    assert_same,
    difference,
    prepared,
    prompt_of,
    written_kv,
)
from tests.tiny import KINDS, tiny_model

POLICIES = ("speccache", "random", "full_reuse")
THREE = prompt_of(CHUNKS)


@pytest.fixture(scope="module", autouse=True)
def warm(tsc: SpecCache) -> None:
    tsc.warm(CHUNKS, show_progress=False)


@pytest.fixture(scope="module", params=sorted(KINDS))
def any_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A warm engine over each architecture and RoPE kind."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    with SpecCache(
        model=str(tiny_model(folder / "model", request.param)),
        engine="transformers",
        policy="random",
        engine_options={"device": "cpu", "dtype": "float32", "max_model_len": 2048},
    ) as running:
        running.warm(CHUNKS, show_progress=False)
        yield running


# Laws for every architecture and RoPE kind.


def test_recompute_ratio_one_equals_plain_prefill_on_every_kind(any_kind: SpecCache) -> None:
    request = prepared(any_kind, THREE, recompute_ratio=1.0).request
    assert_same(ask(any_kind, THREE, recompute_ratio=1.0), ask(any_kind, THREE, policy="full_recompute"))
    plain = written_kv(any_kind, request.prompt, None)
    assert_kv_equal(written_kv(any_kind, request.prompt, request.selection), plain)


@pytest.mark.parametrize("policy", ["random", "full_reuse"])
def test_layer_0_kv_equals_plain_prefill_on_every_kind(any_kind: SpecCache, policy: str) -> None:
    """It depends on token and position only, so it proves assembly, positions, store and recovery at once."""
    request = prepared(any_kind, THREE, policy=policy, recompute_ratio=0.15).request
    assert request.selection is not None
    assert len(request.selection.positions) < request.prompt.n_chunk_tokens
    reused = written_kv(any_kind, request.prompt, request.selection)
    plain = written_kv(any_kind, request.prompt, None)
    assert_kv_equal(reused, plain, layers=slice(0, 1))
    # The deeper layers are approximate, or the test would show nothing.
    assert (reused.values[1:] - plain.values[1:]).abs().max() > 1e-2


def test_one_chunk_at_its_captured_position_equals_plain_prefill_on_every_kind(any_kind: SpecCache) -> None:
    prompt = any_kind._open().tokenizer.header() + CHUNKS[0] + "\n\nQuestion: when was the mill built?"
    ours = ask(any_kind, prompt, policy="full_reuse")
    assert_same(ours, ask(any_kind, prompt, policy="full_recompute"))
    assert ours.report.loaded_tokens == ours.report.matched_tokens > 0


# Laws of the engine.


@pytest.mark.parametrize("policy", ["speccache", "random"])
@pytest.mark.parametrize("scoring", ["cached", "online"])
def test_recompute_ratio_one_equals_plain_prefill(tsc: SpecCache, policy: str, scoring: str) -> None:
    plain = ask(tsc, THREE, policy="full_recompute")
    ours = ask(tsc, THREE, policy=policy, recompute_ratio=1.0, scoring=scoring)
    assert_same(ours, plain)
    assert ours.report.recomputed_tokens == ours.report.matched_tokens > 0
    assert plain.report.loaded_tokens == 0


def test_speccache_keeps_layer_0_exact(tsc: SpecCache) -> None:
    request = prepared(tsc, THREE, policy="speccache", recompute_ratio=0.15).request
    reused, plain = written_kv(tsc, request.prompt, request.selection), written_kv(tsc, request.prompt, None)
    assert_kv_equal(reused, plain, layers=slice(0, 1))


@pytest.mark.parametrize("policy", ["full_recompute", "full_reuse"])
def test_an_exact_repeat_answers_the_same_and_nothing_leaks_between_requests(tsc: SpecCache, policy: str) -> None:
    first = ask(tsc, THREE, policy=policy)
    other = ask(tsc, THREE, policy="full_reuse" if policy == "full_recompute" else "full_recompute")
    assert difference(other, first) > 1e-2, "reuse is exact here, so the law would show nothing"
    again = ask(tsc, THREE, policy=policy, cold=False)
    assert_same(again, first, atol=0.0)
    assert again.report.cached_tokens == 0, "this engine has no prefix cache"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_permutations_reuse_all_chunks(tsc: SpecCache, order: tuple[int, ...]) -> None:
    prompt = prompt_of([CHUNKS[i] for i in order])
    report = ask(tsc, prompt, policy="full_reuse").report
    assert report.chunks_reused == 3
    assert report.loaded_tokens == report.matched_tokens
    assert report.missed_tokens == 0
    request = prepared(tsc, prompt, policy="full_reuse").request
    reused, plain = written_kv(tsc, request.prompt, request.selection), written_kv(tsc, request.prompt, None)
    assert_kv_equal(reused, plain, layers=slice(0, 1))


def test_a_prompt_with_the_same_chunk_twice(tsc: SpecCache) -> None:
    prompt = prompt_of([CHUNKS[0], CHUNKS[1], CHUNKS[0]])
    assert_same(ask(tsc, prompt, recompute_ratio=1.0), ask(tsc, prompt, policy="full_recompute"))
    assert ask(tsc, prompt, policy="full_reuse").report.chunks_reused == 3
    request = prepared(tsc, prompt, policy="full_reuse").request
    reused, plain = written_kv(tsc, request.prompt, request.selection), written_kv(tsc, request.prompt, None)
    assert_kv_equal(reused, plain, layers=slice(0, 1))


def test_a_prompt_that_ends_inside_its_last_chunk(tsc: SpecCache) -> None:
    prompt = tsc._open().tokenizer.header() + CHUNKS[0] + "\n" + CHUNKS[1]
    assert_same(ask(tsc, prompt, recompute_ratio=1.0), ask(tsc, prompt, policy="full_recompute"))
    report = ask(tsc, prompt, policy="full_reuse").report
    assert report.loaded_tokens == report.matched_tokens - 1
    assert report.recomputed_tokens == 1, "the last prompt token's logits are needed"


def test_a_cut_chunk_is_reused_up_to_the_cut(tsc: SpecCache) -> None:
    prompt = prompt_of([CHUNKS[0][: len(CHUNKS[0]) * 2 // 3], CHUNKS[1]])
    assert ask(tsc, prompt, policy="full_reuse").report.chunks_reused == 2
    assert_same(ask(tsc, prompt, recompute_ratio=1.0), ask(tsc, prompt, policy="full_recompute"))


def test_a_missing_chunk_is_recomputed_the_others_reused_and_it_comes_back(tsc: SpecCache) -> None:
    key, store = _key(tsc, CHUNKS[0]), _store(tsc)
    assert store.delete(key)
    report = ask(tsc, THREE, policy="full_reuse").report
    assert report.missed_keys == (key,)
    assert report.chunks_reused == 2
    assert report.missed_tokens > 0
    assert report.loaded_tokens + report.missed_tokens == report.matched_tokens
    _wait_until(lambda: store.contains(key))
    assert ask(tsc, THREE, policy="full_reuse").report.chunks_reused == 3


@pytest.mark.parametrize("damage", ["vanished", "corrupt", "other tokens"])
def test_a_chunk_lost_after_the_request_was_planned_is_a_hole_not_an_error(tsc: SpecCache, damage: str) -> None:
    host, key, store = tsc._open(), _key(tsc, CHUNKS[0]), _store(tsc)
    request = prepared(tsc, THREE, policy="full_reuse", recompute_ratio=0.0)
    if damage == "corrupt":
        file = store._file(key)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        store.delete(key)
    if damage == "other tokens":
        store.put(key, store.get(_key(tsc, CHUNKS[1])))
    answer = next(d.completion for d in host.loop.iterate(lambda: tsc._deltas(request)) if d.completion)
    assert answer.report.missed_keys == (key,)
    assert answer.report.chunks_reused == 2
    assert answer.report.loaded_tokens + answer.report.missed_tokens == answer.report.matched_tokens
    _wait_until(lambda: not tsc._recapturing)
    # The hole is the first chunk: nothing approximate is before it, so its KV is exact in every layer.
    store.delete(key)
    reused, plain = (written_kv(tsc, request.prompt, s) for s in (request.request.selection, None))
    end = request.prompt.placements[0].end
    for ours, theirs in ((reused.keys, plain.keys), (reused.values, plain.values)):
        torch.testing.assert_close(ours[:, :end], theirs[:, :end], atol=KV_ATOL, rtol=0)
    tsc.warm(CHUNKS, show_progress=False)


@pytest.mark.parametrize("policy", [*POLICIES, "full_recompute"])
def test_report_adds_up_to_the_prompt(tsc: SpecCache, policy: str) -> None:
    report = ask(tsc, THREE, policy=policy, recompute_ratio=0.3).report
    parts = ("cached", "loaded", "recomputed", "missed", "fresh")
    assert sum(getattr(report, f"{part}_tokens") for part in parts) == report.prompt_tokens
    seconds = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert seconds == pytest.approx(report.ttft_s, abs=1e-3)


def test_mixed_concurrent_requests_equal_the_same_requests_alone(tsc: SpecCache) -> None:
    asks = [
        (prompt_of([CHUNKS[i], CHUNKS[j]]), policy)
        for (i, j), policy in itertools.product(itertools.permutations(range(3), 2), ("speccache", "full_recompute"))
    ]
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 8, "ignore_eos": True}
    alone = [ask(tsc, prompt, policy=policy) for prompt, policy in asks]

    async def together() -> list[Any]:
        return await asyncio.gather(*[tsc.agenerate(prompt, policy=policy, **options) for prompt, policy in asks])

    for found, expected in zip(asyncio.run(together()), alone, strict=True):
        assert_same(found, expected, atol=0.0)


def test_decoding_over_reused_kv_equals_prefilling_the_same_answer(tsc: SpecCache) -> None:
    """The cache grows at the right end: logprobs of the n-th token do not depend on how its past got there."""
    prompt = tsc._open().tokenizer.header() + CHUNKS[0] + "\n\nQuestion: when?"
    first = ask(tsc, prompt, policy="full_reuse", max_tokens=1)
    both = ask(tsc, prompt, policy="full_reuse", max_tokens=2)
    assert first.logprobs is not None and both.logprobs is not None
    token = max(first.logprobs[0], key=lambda t: first.logprobs[0][t])
    request = prepared(tsc, prompt, policy="full_recompute").request
    target = tsc._open().engine._alive()  # type: ignore[attr-defined]
    _, logits = target.prefill([*request.prompt.token_ids, token])
    expected = logits.float().log_softmax(-1)
    for found, logprob in both.logprobs[1].items():
        assert abs(logprob - float(expected[found])) < 2e-4


def _key(sc: SpecCache, text: str) -> ChunkKey:
    return sc._library.chunk(text).key


def _store(sc: SpecCache) -> Any:
    return sc._open().engine._store  # type: ignore[attr-defined]


def _wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the missed chunk was not captured again"
        time.sleep(0.02)
