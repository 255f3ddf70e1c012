from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from speccache_rag.chunks import warming
from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.warming import IN_FLIGHT, plan_warm, warm_chunks
from speccache_rag.engines.base import CaptureRequest
from speccache_rag.errors import (
    ChunkTooLong,
    ConfigurationError,
    EmptyChunk,
    PromptError,
    StoreBusy,
    StoreUnavailable,
)
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.types import WarmReport
from tests.unit.fake_engine import BYTES_PER_TOKEN, FakeEngine, FakeScorer, make_library

TEXTS = [f"Text {i}: the keeper of lighthouse {i} wrote down the weather of day {i * 7}." for i in range(5)]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PromptTokenizer:
    return PromptTokenizer(AutoTokenizer.from_pretrained(tiny_folder))


@pytest.fixture
def catalogue() -> Iterator[Catalogue]:
    opened = Catalogue()
    yield opened
    opened.close()


@pytest.fixture
def library(tokenizer: PromptTokenizer, catalogue: Catalogue) -> ChunkLibrary:
    return make_library(tokenizer, catalogue)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def warm(
    engine: FakeEngine, library: ChunkLibrary, texts: list[str], scorer: FakeScorer | None = None, **more: Any
) -> WarmReport:
    like: Any = scorer
    return await warm_chunks(engine, library, like, plan_warm(library, texts).chunks, **more)


def known(library: ChunkLibrary, texts: list[str]) -> list[bool]:
    return [bool(library.match(text)) for text in texts]


# Planning.


BAD = ["", " \n\n", "\x0c", "a\ud835b", "too long " * 2000]


def test_a_bad_text_is_named_by_its_place(library: ChunkLibrary) -> None:
    for bad in BAD:
        with pytest.raises(PromptError, match="^Text 1: "):
            plan_warm(library, [TEXTS[0], bad])


def test_bad_texts_are_skipped_and_named(library: ChunkLibrary) -> None:
    planned = plan_warm(library, [TEXTS[0], *BAD, TEXTS[1]], skip_bad=True)
    assert [chunk.text for chunk in planned.chunks] == TEXTS[:2]
    assert [bad.index for bad in planned.bad] == [1, 2, 3, 4, 5]
    assert all(bad.reason for bad in planned.bad)
    assert planned.n_texts == 7


async def test_a_full_queue_is_waited_for(
    engine: FakeEngine, library: ChunkLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "BUSY_S", 0.001)
    capture, refused = engine.capture, set[str]()

    async def busy_once(request: CaptureRequest) -> Any:
        if request.chunk.key not in refused:
            refused.add(request.chunk.key)
            raise StoreBusy("The queue is full.")
        return await capture(request)

    monkeypatch.setattr(engine, "capture", busy_once)
    report = await warm(engine, library, TEXTS)
    assert (report.n_captured, report.n_held, len(refused)) == (5, 5, 5)


async def test_the_report_says_what_is_held(engine: FakeEngine, library: ChunkLibrary) -> None:
    capture = engine.capture

    async def into_a_small_store(request: CaptureRequest) -> Any:
        result = await capture(request)
        engine.held = {request.chunk.key}
        return result

    engine.capture = into_a_small_store  # type: ignore[method-assign]
    report = await warm(engine, library, TEXTS)
    assert (report.n_captured, report.n_held) == (5, 1)


def test_repeated_texts_are_one_chunk(library: ChunkLibrary) -> None:
    texts = [TEXTS[0], TEXTS[1], f"  {TEXTS[0]}\n", TEXTS[0]]
    planned = plan_warm(library, iter(texts))
    assert [chunk.text for chunk in planned.chunks] == TEXTS[:2]
    assert planned.n_texts == 4


@pytest.mark.parametrize("empty", ["", "  \n\t "])
def test_an_empty_text_is_refused(library: ChunkLibrary, empty: str) -> None:
    with pytest.raises(EmptyChunk, match="no text"):
        plan_warm(library, [TEXTS[0], empty])


def test_a_chunk_must_fit_in_the_context_with_anchor_and_one_new_token(tokenizer: PromptTokenizer) -> None:
    n_tokens = len(tokenizer.chunk_tokens(TEXTS[0])[0])
    fits = len(tokenizer.encode(tokenizer.header())) + n_tokens + 1
    assert len(plan_warm(make_library(tokenizer, max_model_len=fits), TEXTS[:1]).chunks) == 1
    with pytest.raises(ChunkTooLong) as caught:
        plan_warm(make_library(tokenizer, max_model_len=fits - 1), TEXTS[:1])
    for part in (f"{n_tokens} tokens", f"at most {n_tokens - 1} fit", f"context of {fits - 1}", TEXTS[0][:20]):
        assert part in str(caught.value)


def test_planning_learns_nothing(library: ChunkLibrary) -> None:
    plan_warm(library, TEXTS)
    assert len(library) == 0


# Warming.


async def test_chunks_are_captured_behind_the_anchor_learned_and_scored(
    engine: FakeEngine, library: ChunkLibrary
) -> None:
    scorer, progress = FakeScorer(), []
    report = await warm(engine, library, TEXTS, scorer, advance=lambda: progress.append(1))
    tokens = sum(library.chunk(text).n_tokens for text in TEXTS)
    assert (report.n_texts, report.n_captured, report.n_skipped) == (5, 5, 0)
    assert (report.captured_tokens, report.captured_bytes) == (tokens, tokens * BYTES_PER_TOKEN)
    assert report.seconds > 0
    assert {request.anchor_ids for request in engine.captured} == {library.namespace.anchor_ids}
    assert len(library.namespace.anchor_ids) > 0
    assert known(library, TEXTS) == [True] * 5
    assert sorted(scorer.calls) == sorted((text, library.anchor) for text in TEXTS)
    assert len(progress) == 5


async def test_warming_again_does_nothing(engine: FakeEngine, library: ChunkLibrary) -> None:
    scorer, progress = FakeScorer(), []
    await warm(engine, library, TEXTS, scorer)
    report = await warm(engine, library, TEXTS, scorer, advance=lambda: progress.append(1))
    assert (report.n_captured, report.n_skipped) == (0, 5)
    assert (report.captured_tokens, report.captured_bytes) == (0, 0)
    assert len(engine.captured) == len(scorer.calls) == 5
    assert len(progress) == 5  # the bar still ends full


async def test_only_what_the_store_lacks_is_captured(engine: FakeEngine, library: ChunkLibrary) -> None:
    await warm(engine, library, TEXTS[:2])
    engine.held.discard(library.chunk(TEXTS[1]).key)  # evicted
    report = await warm(engine, library, TEXTS)
    assert (report.n_captured, report.n_skipped) == (4, 1)
    assert [request.chunk.text for request in engine.captured[2:]] == TEXTS[1:]


async def test_scores_are_added_to_chunks_captured_without_them(engine: FakeEngine, library: ChunkLibrary) -> None:
    await warm(engine, library, TEXTS)
    first, other = FakeScorer(), FakeScorer("another model")
    report = await warm(engine, library, TEXTS, first)
    assert (report.n_captured, len(first.calls)) == (0, 5)
    await warm(engine, library, TEXTS, other)
    assert len(other.calls) == 5


async def test_a_store_that_holds_the_kv_and_a_catalogue_that_lost_it_meet_again(
    engine: FakeEngine, tokenizer: PromptTokenizer, library: ChunkLibrary
) -> None:
    await warm(engine, library, TEXTS)
    forgetful = make_library(tokenizer)
    await warm(engine, forgetful, TEXTS)
    assert len(engine.captured) == 5
    assert known(forgetful, TEXTS) == [True] * 5


async def test_what_was_warmed_is_known_to_a_new_library(
    engine: FakeEngine, tokenizer: PromptTokenizer, library: ChunkLibrary, catalogue: Catalogue
) -> None:
    await warm(engine, library, TEXTS)
    assert known(make_library(tokenizer, catalogue), TEXTS) == [True] * 5


async def test_no_texts_are_fine(engine: FakeEngine, library: ChunkLibrary) -> None:
    report = await warm(engine, library, [])
    assert (report.n_texts, report.n_captured, report.n_skipped) == (0, 0, 0)


async def test_captures_run_at_once_but_not_all(engine: FakeEngine, library: ChunkLibrary) -> None:
    engine.capture_s = 0.001
    texts = [f"A short text about harbour number {i}." for i in range(3 * IN_FLIGHT)]
    await warm(engine, library, texts)
    assert engine.most_in_flight == IN_FLIGHT


async def test_scoring_does_not_block_the_event_loop(engine: FakeEngine, library: ChunkLibrary) -> None:
    threads = []

    class Watched(FakeScorer):
        def score_after(self, prefix: str, text: str) -> Any:
            threads.append(threading.current_thread())
            return super().score_after(prefix, text)

    await warm(engine, library, TEXTS, Watched())
    assert len(threads) == 5
    assert threading.current_thread() not in threads


# Errors.


async def test_a_chunk_is_learned_only_when_its_kv_is_stored(engine: FakeEngine, library: ChunkLibrary) -> None:
    learned_before: list[bool] = []

    class Watching(FakeEngine):
        async def capture(self, request: CaptureRequest) -> Any:
            learned_before.extend(known(library, [request.chunk.text]))
            return await super().capture(request)

    await warm(Watching(), library, TEXTS)
    assert learned_before == [False] * 5


async def test_the_first_error_stops_the_rest_and_is_raised_as_it_is(engine: FakeEngine, library: ChunkLibrary) -> None:
    texts = [f"A short text about harbour number {i}." for i in range(3 * IN_FLIGHT)]
    fault = StoreUnavailable("The disk is full.")
    engine.capture_s = 0.001
    engine.faults[texts[1]] = fault
    with pytest.raises(StoreUnavailable) as caught:
        await warm(engine, library, texts)
    assert caught.value is fault
    assert engine.in_flight == 0
    assert len(engine.captured) < len(texts) - 1
    # What is known is stored; what was stored and not learned any more, the next run learns.
    stored = {request.chunk.text for request in engine.captured}
    assert {text for text, found in zip(texts, known(library, texts), strict=True) if found} <= stored
    n_captured = len(engine.captured)
    await asyncio.sleep(0.01)
    assert len(engine.captured) == n_captured  # nothing goes on in the background


async def test_a_stopped_run_is_taken_up_where_it_stopped(engine: FakeEngine, library: ChunkLibrary) -> None:
    engine.faults[TEXTS[3]] = StoreUnavailable("The disk is full.")
    with pytest.raises(StoreUnavailable):
        await warm(engine, library, TEXTS)
    done = len(engine.captured)
    engine.faults.clear()
    report = await warm(engine, library, TEXTS)
    assert (report.n_captured, report.n_skipped) == (5 - done, done)
    assert sorted(request.chunk.text for request in engine.captured) == TEXTS  # each once
    assert known(library, TEXTS) == [True] * 5


async def test_a_scorer_that_fails_stops_the_run_and_loses_no_kv(
    engine: FakeEngine, library: ChunkLibrary, catalogue: Catalogue
) -> None:
    scorer = FakeScorer()
    scorer.fault = ConfigurationError("The speculative model cannot be loaded.")
    with pytest.raises(ConfigurationError) as caught:
        await warm(engine, library, TEXTS, scorer)
    assert caught.value is scorer.fault
    done = len(engine.captured)
    assert done > 0
    scorer.fault = None
    report = await warm(engine, library, TEXTS, scorer)
    assert (report.n_captured, report.n_skipped) == (5 - done, done)
    assert all(catalogue.scores(library.chunk(text).key, scorer.identity) is not None for text in TEXTS)


async def test_a_cancelled_run_cancels_its_captures(engine: FakeEngine, library: ChunkLibrary) -> None:
    engine.capture_s = 10.0
    task = asyncio.create_task(warm(engine, library, TEXTS))
    while not engine.in_flight:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.in_flight == 0
    assert engine.captured == []
    assert known(library, TEXTS) == [False] * 5
