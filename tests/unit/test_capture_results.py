from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.vllm.frontend.capture_results import CaptureResults
from speccache_rag.errors import EngineClosed, StoreUnavailable


class Worker:
    """What the worker knows of captures; each result is given once."""

    def __init__(self) -> None:
        self.done: dict[str, int | dict[str, str]] = {}
        self.asked: list[list[str]] = []

    async def fetch(self, tags: Sequence[str]) -> dict[str, int | dict[str, str]]:
        self.asked.append(list(tags))
        await asyncio.sleep(0)
        return {tag: self.done.pop(tag) for tag in tags if tag in self.done}


async def test_a_result_comes_when_the_worker_has_it() -> None:
    worker = Worker()
    results = CaptureResults(worker.fetch)
    waiting = asyncio.create_task(results.result("a"))
    while len(worker.asked) < 3:
        await asyncio.sleep(0.001)
    worker.done["a"] = 4096
    assert await waiting == 4096
    assert not worker.done


async def test_one_look_serves_all_that_wait() -> None:
    worker = Worker()
    results = CaptureResults(worker.fetch)
    waiting = [asyncio.create_task(results.result(tag)) for tag in "abc"]
    await asyncio.sleep(0)
    worker.done = {"c": 3, "a": 1, "b": 2}
    assert await asyncio.gather(*waiting) == [1, 2, 3]
    assert worker.asked[0] == ["a", "b", "c"]
    assert len(worker.asked) <= 2


async def test_looking_stops_when_nobody_waits_and_begins_again() -> None:
    worker = Worker()
    results = CaptureResults(worker.fetch)
    for tag in ("a", "b"):
        worker.done[tag] = 1
        assert await results.result(tag) == 1
        await asyncio.sleep(0.05)
        looks = len(worker.asked)
        await asyncio.sleep(0.05)
        assert len(worker.asked) == looks


async def test_an_error_of_one_capture_is_raised_there_alone() -> None:
    worker = Worker()
    results = CaptureResults(worker.fetch)
    worker.done = {"a": StoreUnavailable("the disk is full").to_dict(), "b": 7}
    a, b = await asyncio.gather(results.result("a"), results.result("b"), return_exceptions=True)
    assert isinstance(a, StoreUnavailable) and "the disk is full" in str(a)
    assert b == 7


async def test_a_dead_engine_ends_all_waiting() -> None:
    async def fetch(_: Sequence[str]) -> dict[str, int | dict[str, str]]:
        raise EngineClosed("it is gone")

    results = CaptureResults(fetch)
    found = await asyncio.gather(results.result("a"), results.result("b"), return_exceptions=True)
    assert [type(error) for error in found] == [EngineClosed, EngineClosed]


async def test_who_stops_waiting_is_not_asked_for_any_more() -> None:
    worker = Worker()
    results = CaptureResults(worker.fetch)
    gone, stays = (asyncio.create_task(results.result(tag)) for tag in ("gone", "stays"))
    while not worker.asked:
        await asyncio.sleep(0.001)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    worker.done["stays"] = 1
    assert await stays == 1
    assert worker.asked[-1] == ["stays"]
