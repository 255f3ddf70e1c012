"""Requests of every kind, from every kind of caller, on one engine; and on one whose memory is too small for them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from speccache_rag import SpecCache
from speccache_rag.errors import EngineError, StoreUnavailable
from speccache_rag.types import Completion
from tests.conftest import tiny_engine_options
from tests.hosts import host_of, known
from tests.integration.processes import wait_until
from tests.parity.engines import CHUNKS, prompt_of

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(CHUNKS)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
ORDERS = list(itertools.permutations(CHUNKS, 2))
POLICIES = ("speccache", "full_reuse", "full_recompute")
ASKS = [(prompt_of(texts), policy) for texts, policy in zip(ORDERS * 2, itertools.cycle(POLICIES), strict=False)]


@pytest.fixture(scope="module", autouse=True)
def warm(sc: SpecCache) -> None:
    sc.warm(CHUNKS, show_progress=False)


@pytest.fixture(scope="module")
def alone(sc: SpecCache) -> list[str]:
    """The answers of `ASKS`, one after the other."""
    return [sc.generate(prompt, policy=policy, max_tokens=12, **GREEDY).text for prompt, policy in ASKS]


# Streams.


def test_deltas_join_to_the_completion_and_only_the_last_carries_it(sc: SpecCache) -> None:
    *first, last = sc.stream(PROMPT, max_tokens=16, **GREEDY)
    assert len(first) > 3
    assert [delta for delta in first if delta.completion is not None] == []
    assert last.completion is not None
    assert "".join(delta.text for delta in [*first, last]) == last.completion.text
    assert last.completion.usage.completion_tokens == 16
    assert last.completion.text == sc.generate(PROMPT, max_tokens=16, **GREEDY).text


async def test_an_async_stream_gives_the_same_deltas(sc: SpecCache) -> None:
    deltas = [delta async for delta in sc.astream(PROMPT, max_tokens=16, **GREEDY)]
    assert [delta.completion is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert "".join(delta.text for delta in deltas) == sc.generate(PROMPT, max_tokens=16, **GREEDY).text


@pytest.mark.parametrize("policy", ["full_reuse", "full_recompute"])
def test_closing_a_stream_frees_its_request(sc: SpecCache, policy: str) -> None:
    stream = sc.stream(PROMPT, policy=policy, max_tokens=700, **GREEDY)
    next(stream)
    assert not _idle(sc)
    stream.close()
    assert wait_until(lambda: _idle(sc), seconds=5), "700 tokens would take longer"


async def test_leaving_an_async_stream_frees_its_request(sc: SpecCache) -> None:
    async def first_delta() -> str:
        stream = sc.astream(PROMPT, max_tokens=700, **GREEDY)
        try:
            return (await anext(stream)).text
        finally:
            await stream.aclose()

    await first_delta()
    assert await asyncio.to_thread(wait_until, lambda: _idle(sc), 5)


async def test_cancelling_a_task_frees_its_request(sc: SpecCache) -> None:
    task = asyncio.create_task(sc.agenerate(PROMPT, max_tokens=700, **GREEDY))
    assert await asyncio.to_thread(wait_until, lambda: not _idle(sc), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(wait_until, lambda: _idle(sc), 5)


def _idle(sc: SpecCache) -> bool:
    """Whether vLLM's front end and engine process have no request; the latter then lets its cache be reset."""
    if host_of(sc).engine._llm.output_processor.get_num_unfinished_requests() > 0:  # type: ignore[attr-defined]
        return False
    try:
        sc.reset_prefix_cache()
    except EngineError:
        return False
    return True


# Many callers.


def test_many_threads_get_the_answers_of_one(sc: SpecCache, alone: list[str]) -> None:
    def ask(item: tuple[Any, str]) -> str:
        return sc.generate(item[0], policy=item[1], max_tokens=12, **GREEDY).text

    with ThreadPoolExecutor(len(ASKS)) as threads:
        assert list(threads.map(ask, ASKS)) == alone


def test_two_event_loops_get_the_answers_of_one(sc: SpecCache, alone: list[str]) -> None:
    async def ask_all() -> list[str]:
        answers = [sc.agenerate(prompt, policy=policy, max_tokens=12, **GREEDY) for prompt, policy in ASKS]
        return [answer.text for answer in await asyncio.gather(*answers)]

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(asyncio.run, ask_all()) for _ in range(2)]
        assert [each.result() for each in both] == [alone, alone]


# Sampling.


def test_stop_strings_end_the_answer_and_stay_out_of_it(sc: SpecCache) -> None:
    full = sc.generate(PROMPT, max_tokens=24, **GREEDY).text
    stop = full[len(full) // 2 :][:3]
    end = full.index(stop)
    answer = sc.generate(PROMPT, max_tokens=24, stop=[stop], **GREEDY)
    assert (answer.text, answer.finish_reason) == (full[:end], "stop")
    streamed = [delta.text for delta in sc.stream(PROMPT, max_tokens=24, stop=stop, **GREEDY)]
    assert "".join(streamed) == full[:end]


def test_a_seed_repeats_a_sampled_answer(sc: SpecCache) -> None:
    def sample(seed: int) -> str:
        return sc.generate(PROMPT, max_tokens=16, temperature=2.0, seed=seed, ignore_eos=True).text

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_logprobs_come_with_every_new_token(sc: SpecCache) -> None:
    answer = sc.generate(PROMPT, max_tokens=5, logprobs=3, **GREEDY)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.usage.completion_tokens == 5
    for token in answer.logprobs:
        assert len(token) == 3
        assert all(logprob <= 0 for logprob in token.values())
    best = [max(token, key=lambda i: token[i]) for token in answer.logprobs]
    assert sc.tokenizer.decode(best) == answer.text
    assert sc.generate(PROMPT, max_tokens=5, **GREEDY).logprobs is None


def test_one_token_is_enough(sc: SpecCache) -> None:
    answer = sc.generate(PROMPT, max_tokens=1, **GREEDY)
    assert (answer.usage.completion_tokens, answer.finish_reason) == (1, "length")
    assert answer.usage.total_tokens == answer.report.prompt_tokens + 1
    assert 0 < answer.report.ttft_s < 60


# Sharing.


def test_two_objects_with_different_policies_share_an_engine(sc: SpecCache) -> None:
    with SpecCache(**{**sc.config.model_dump(), "policy": "full_reuse"}) as other:
        assert host_of(other) is host_of(sc)
        theirs, ours = other.generate(PROMPT, max_tokens=2), sc.generate(PROMPT, max_tokens=2)
        assert (theirs.report.policy, ours.report.policy) == ("full_reuse", "speccache")
        assert theirs.report.chunks_reused == ours.report.chunks_reused == 3, "what one has warmed the other reuses"
    assert sc.generate(PROMPT, max_tokens=2).report.chunks_reused == 3, "closing one leaves the engine to the other"


def test_tenants_never_meet(sc: SpecCache) -> None:
    text = (
        "The safe of the harbour office opens with the numbers nine, four and thirty. Whoever turns the wheel too far "
        "has to begin again, and the clerk writes down the hour."
    )
    prompt = prompt_of([text])
    options = sc.config.model_dump()
    with SpecCache(**{**options, "tenant": "a"}) as a, SpecCache(**{**options, "tenant": "b"}) as b:
        assert host_of(a) is host_of(b) is host_of(sc)
        assert a.warm([text], show_progress=False).n_captured == 1
        assert a.generate(prompt, max_tokens=2).report.chunks_reused == 1
        for stranger in (b, sc):
            report = stranger.generate(prompt, max_tokens=2).report
            assert (report.chunks_matched, report.loaded_tokens, report.missed_tokens) == (0, 0, 0)
        assert b.warm([text], show_progress=False).n_captured == 1, "the stored KV of a is not b's"


def test_stats_count_requests_and_tokens(sc: SpecCache) -> None:
    with SpecCache(**sc.config.model_dump()) as fresh:
        assert fresh.stats()["requests"] == 0
        fresh.reset_prefix_cache()
        answers = [
            fresh.generate(PROMPT, policy=policy, max_tokens=1, recompute_ratio=0.3)
            for policy in ("full_reuse", "speccache", "full_recompute")
        ]
        with closing(fresh.stream(PROMPT, max_tokens=700, **GREEDY)) as unfinished:
            next(unfinished)
        stats = fresh.stats()
        assert stats["requests"] == 3, "an answer that nobody waited for is not counted"
        for name in ("prompt", "matched", "cached", "loaded", "recomputed", "missed", "fresh"):
            field = f"{name}_tokens"
            assert stats[field] == sum(getattr(answer.report, field) for answer in answers)
        assert stats["loaded_tokens"] > 0
        assert stats["chunks_reused"] == 6
        assert stats["known_chunks"] == sc.stats()["known_chunks"] >= 3


# An engine with little memory: chunk KV in RAM, and a KV cache that holds two and a half of the prompts below.

RAM_BYTES = 1 << 20


@pytest.fixture(scope="module")
def cramped(tiny_folder: Path) -> Iterator[SpecCache]:
    """Chunk KV in the worker's RAM (512 tokens of it), and KV cache for 1,280 tokens."""
    # Without a prefix cache, a preempted request has to be filled again from the start.
    options = tiny_engine_options(kv_cache_memory_bytes=1280 * 2048, block_size=32, enable_prefix_caching=False)
    with pytest.MonkeyPatch.context() as patch:
        # Lets tests look into the worker process (see `_in_worker`).
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with SpecCache(
            model=str(tiny_folder),
            policy="full_reuse",
            admission="first",
            ram_bytes=RAM_BYTES,
            engine_options=options,
        ) as sc:
            assert os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
            yield sc.start()


def _in_worker(sc: SpecCache, function: Callable[[Any], Any]) -> Any:
    """`function(worker half)`, run in the worker process."""

    def call(worker: Any) -> Any:
        return function(worker._speccache())

    host = host_of(sc)
    return host.loop.run(host.engine._rpc(call))  # type: ignore[attr-defined]


def test_a_store_in_ram_warms_and_reuses(cramped: SpecCache) -> None:
    report = cramped.warm(CHUNKS, show_progress=False)
    assert (report.n_captured, report.n_skipped) == (3, 0)
    assert report.captured_bytes == report.captured_tokens * 2048
    assert cramped.warm(CHUNKS, show_progress=False).n_captured == 0
    answer = cramped.generate(PROMPT, max_tokens=2)
    assert answer.report.chunks_reused == 3
    assert answer.report.loaded_tokens == answer.report.matched_tokens


def test_a_chunk_that_leaves_ram_is_a_miss_and_comes_back(cramped: SpecCache) -> None:
    cramped.warm([CHUNKS[0]], show_progress=False)
    cramped.warm([f"Filler {i}: " + "the tide is low. " * 20 for i in range(8)], show_progress=False)
    answer = cramped.generate(prompt_of([CHUNKS[0]]), max_tokens=2)
    assert (answer.report.chunks_matched, answer.report.chunks_reused) == (1, 0)
    assert answer.report.missed_tokens == answer.report.matched_tokens
    before = cramped.stats()["recaptured"]
    assert wait_until(lambda: cramped.stats()["recaptured"] > before or _present(cramped, CHUNKS[0]), seconds=20)
    assert cramped.generate(prompt_of([CHUNKS[0]]), max_tokens=2).report.chunks_reused == 1


def test_a_chunk_too_big_for_ram_is_refused_and_the_engine_lives(cramped: SpecCache) -> None:
    with pytest.raises(StoreUnavailable, match="limited to 1048576 bytes.*Raise ram_bytes"):
        cramped.warm(["stone " * 900], show_progress=False)
    assert cramped.generate("The engine is still there.", max_tokens=1).usage.completion_tokens == 1


def test_preempted_requests_give_the_answers_they_give_alone(cramped: SpecCache) -> None:
    cramped.warm(CHUNKS, show_progress=False)
    prompts = [prompt_of(texts) for texts in list(itertools.permutations(CHUNKS))[:5]]
    # All of them reuse chunks, so whichever vLLM preempts shows.
    policies = ("full_reuse", "random", "full_reuse", "random", "full_reuse")
    asks = [
        {"prompt": p, "policy": policy, "recompute_ratio": 0.3} for p, policy in zip(prompts, policies, strict=True)
    ]
    alone = [cramped.generate(**ask, max_tokens=160, **GREEDY) for ask in asks]
    _in_worker(cramped, _count_fills)

    async def together() -> list[Completion]:
        return await asyncio.gather(*[cramped.agenerate(**ask, max_tokens=160, **GREEDY) for ask in asks])

    answers = asyncio.run(together())
    fills = Counter(_in_worker(cramped, lambda half: half.filled))
    assert len(fills) == len(asks)
    assert max(fills.values()) > 1, "no request was preempted: the test shows nothing"
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    for answer in answers:
        report = answer.report
        assert (report.chunks_reused, report.missed_tokens) == (3, 0)
        parts = ("cached", "loaded", "recomputed", "missed", "fresh")
        assert sum(getattr(report, f"{part}_tokens") for part in parts) == report.prompt_tokens


def _count_fills(half: Any) -> None:
    """Note the request of every fill; one that was preempted has two."""
    half.filled, step = [], half._fills.step

    def counting(starts: Any, slices: Any, dropped: Any) -> None:
        half.filled += [order.request_id for order in starts]
        step(starts, slices, dropped)

    half._fills.step = counting


def test_requests_that_nobody_waits_for_leave_nothing_in_the_worker(cramped: SpecCache) -> None:
    def left(half: Any) -> list[int]:
        return [len(half._fills._fills), len(half._captures._buffers), len(half._captures._results)]

    cramped.warm(CHUNKS, show_progress=False)
    before = _in_worker(cramped, left)
    for order in itertools.permutations(CHUNKS):
        with closing(cramped.stream(prompt_of(order), max_tokens=300, **GREEDY)) as stream:
            next(stream)
    assert wait_until(lambda: _idle(cramped), seconds=10)
    cramped.generate("One more step takes the news to the worker.", max_tokens=2)
    assert _in_worker(cramped, left) == [0, 0, before[2]]


def test_a_dead_worker_is_an_error_and_no_endless_wait(cramped: SpecCache) -> None:
    """The last test on this engine."""

    def pid(half: Any) -> int:
        import os

        return os.getpid()

    with closing(cramped.stream(PROMPT, max_tokens=700, **GREEDY)) as stream:
        next(stream)
        os.kill(_in_worker(cramped, pid), signal.SIGTERM)
        with pytest.raises(EngineError, match="died"):
            list(stream)
    with pytest.raises(EngineError, match=r"died.*Create a new SpecCache"):
        cramped.generate("Is anybody there?", max_tokens=1)
    with pytest.raises(EngineError, match="died"):
        cramped.warm(["Nor can it learn."], show_progress=False)


def _present(sc: SpecCache, text: str) -> bool:
    return bool(host_of(sc).engine.present([known(sc, text).key])[0])
