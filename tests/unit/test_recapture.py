from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from speccache_rag.chunks import recapture
from speccache_rag.chunks.recapture import Recaptures
from speccache_rag.config import Admission
from speccache_rag.errors import EngineClosed, StoreUnavailable
from speccache_rag.types import Chunk, ChunkKey

CHUNKS = [Chunk(ChunkKey(str(i)), f"text {i}", (i,), np.zeros((1, 2), np.int32)) for i in range(20)]


class Engine:
    """Captures that end when `go` is set, or fail."""

    def __init__(self) -> None:
        self.captured: list[str] = []
        self.at_once = self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()
        self.fault: Exception | None = None
        self.counted: list[bool] = []

    async def capture(self, chunk: Chunk) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            self.captured.append(chunk.key)
            if self.fault is not None:
                raise self.fault
        finally:
            self.at_once -= 1

    def queue(self, admission: Admission = "first") -> Recaptures:
        capture: Callable[[Chunk], Awaitable[object]] = self.capture
        return Recaptures(capture, self.counted.append, admission)


async def settled(queue: Recaptures) -> None:
    while not queue.idle:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("admission", "captured"), [("warm", [0, 0, 0]), ("first", [1, 2, 3]), ("second", [0, 1, 2])])
async def test_which_miss_leads_to_a_capture(admission: Admission, captured: list[int]) -> None:
    engine = Engine()
    queue = engine.queue(admission)
    for n in captured:
        queue.begin(CHUNKS[:1])
        await settled(queue)
        assert len(engine.captured) == n


async def test_few_run_at_once_and_each_once_in_the_order_of_their_misses() -> None:
    engine = Engine()
    engine.go.clear()
    queue = engine.queue()
    for _ in range(3):
        queue.begin(CHUNKS)
        await asyncio.sleep(0)
    assert not queue.idle
    engine.go.set()
    await settled(queue)
    assert engine.captured[0] == "0"
    assert sorted(engine.captured) == sorted(chunk.key for chunk in CHUNKS)
    assert engine.most_at_once == recapture.AT_ONCE
    assert engine.counted == [False] * 20


async def test_the_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recapture, "QUEUED", 5)
    engine = Engine()
    queue = engine.queue()
    queue.begin(CHUNKS)
    await settled(queue)
    assert len(engine.captured) == 5
    queue.begin(CHUNKS[5:7])
    await settled(queue)
    assert engine.captured[5:] == ["5", "6"]


async def test_a_failed_capture_is_left_alone_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(recapture.time, "monotonic", lambda: now)
    engine = Engine()
    engine.fault = StoreUnavailable("the disk is full")
    queue, tried = engine.queue(), []
    for now in range(0, 1000, 10):
        queue.begin(CHUNKS[:1])
        await settled(queue)
        if len(engine.captured) > len(tried):
            tried.append(now)
    assert tried == [0, 30, 90, 210, 450, 930]
    engine.fault = None
    now = 2000.0
    for _ in range(2):
        queue.begin(CHUNKS[:1])
        await settled(queue)
    assert len(engine.captured) == len(tried) + 2, "after a success the slate is clean"
    assert engine.counted == [True] * 6 + [False] * 2


async def test_a_closed_engine_ends_it_quietly(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.fault = EngineClosed("The engine was closed.")
    queue = engine.queue()
    queue.begin(CHUNKS[:3])
    await settled(queue)
    assert caplog.records == []
