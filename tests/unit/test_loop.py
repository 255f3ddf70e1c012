from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from speccache_rag.errors import EngineClosed
from speccache_rag.hosting.loop_thread import LoopThread

SOON_S = 10.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    running = LoopThread("test-loop")
    yield running
    running.stop()


class Source:
    """An async generator function that notes what happens to it; endless unless given `n`."""

    def __init__(self, n: int | None = None, error: Exception | None = None) -> None:
        self.n = n
        self.error = error
        self.started = threading.Event()
        self.ended = threading.Event()
        self.cancelled = False
        self.thread = ""

    async def __call__(self) -> AsyncGenerator[int, None]:
        self.thread = threading.current_thread().name
        self.started.set()
        value = 0
        try:
            while value != self.n:
                yield value
                value += 1
                await asyncio.sleep(0 if value < 3 or self.n is not None else SOON_S)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()


async def forever(started: threading.Event, ended: threading.Event) -> None:
    started.set()
    try:
        await asyncio.sleep(SOON_S)
    finally:
        ended.set()


async def answer() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def fail() -> None:
    raise KeyError("of the work")


# Results and errors.


def test_run_gives_the_result_of_the_loops_thread(loop: LoopThread) -> None:
    assert loop.run(answer()) == "test-loop"


def test_run_raises_the_error_itself(loop: LoopThread) -> None:
    with pytest.raises(KeyError, match="of the work"):
        loop.run(fail())
    assert loop.run(answer()) == "test-loop"  # and goes on


def test_iterate_gives_all_values_in_order(loop: LoopThread) -> None:
    source = Source(100)
    assert list(loop.iterate(source)) == list(range(100))
    assert source.thread == "test-loop"
    assert source.ended.is_set()


def test_iterate_raises_the_error_after_the_values(loop: LoopThread) -> None:
    values = loop.iterate(Source(2, ValueError("of the source")))
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(ValueError, match="of the source"):
        next(values)
    assert list(values) == []


async def test_aiterate_gives_values_and_errors(loop: LoopThread) -> None:
    assert [value async for value in loop.aiterate(Source(100))] == list(range(100))
    values = loop.aiterate(Source(1, ValueError("of the source")))
    assert await anext(values) == 0
    with pytest.raises(ValueError, match="of the source"):
        await anext(values)


def test_an_error_before_the_first_value_arrives_too(loop: LoopThread) -> None:
    def broken() -> AsyncGenerator[int, None]:
        raise LookupError("no such source")

    with pytest.raises(LookupError, match="no such source"):
        next(loop.iterate(broken))


async def test_nothing_starts_before_the_first_next(loop: LoopThread) -> None:
    source = Source()
    values, avalues = loop.iterate(source), loop.aiterate(source)
    assert await asyncio.to_thread(loop.run, answer()) == "test-loop"  # the loop had time for it
    assert not source.started.is_set()
    assert next(values) == 0
    assert source.started.is_set()
    values.close()
    await avalues.aclose()


# Stopping early.


def test_closing_an_iterator_cancels_its_source(loop: LoopThread) -> None:
    source = Source()
    values = loop.iterate(source)
    assert [next(values) for _ in range(3)] == [0, 1, 2]
    values.close()
    assert source.ended.wait(SOON_S)
    assert source.cancelled


def test_leaving_a_for_loop_cancels_its_source(loop: LoopThread) -> None:
    source = Source()
    for value in loop.iterate(source):
        if value == 2:
            break
    gc.collect()
    assert source.ended.wait(SOON_S)


def test_an_error_of_the_consumer_cancels_the_source(loop: LoopThread) -> None:
    source = Source()
    with pytest.raises(ZeroDivisionError), contextlib.closing(loop.iterate(source)) as values:
        for _ in values:
            _ = 1 / 0
    assert source.ended.wait(SOON_S)


async def test_closing_an_async_iterator_cancels_its_source(loop: LoopThread) -> None:
    source = Source()
    async with contextlib.aclosing(loop.aiterate(source)) as values:
        assert await anext(values) == 0
    assert await asyncio.to_thread(source.ended.wait, SOON_S)


async def test_an_abandoned_async_iterator_cancels_its_source(loop: LoopThread) -> None:
    source = Source()
    values = loop.aiterate(source)
    assert await anext(values) == 0
    del values
    gc.collect()
    assert await asyncio.to_thread(source.ended.wait, SOON_S)


async def test_cancelling_the_consuming_task_cancels_the_source(loop: LoopThread) -> None:
    source = Source()

    async def consume() -> None:
        async for _ in loop.aiterate(source):
            pass

    task = asyncio.create_task(consume())
    assert await asyncio.to_thread(source.started.wait, SOON_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(source.ended.wait, SOON_S)
    assert source.cancelled


def test_a_consumer_whose_event_loop_ended_does_not_keep_the_source(loop: LoopThread) -> None:
    source = Source()
    kept = []

    async def take_one() -> None:
        kept.append(loop.aiterate(source))
        assert await anext(kept[0]) == 0

    asyncio.run(take_one())  # shuts its async generators down
    assert source.ended.wait(SOON_S)


# Threads.


def test_an_iterator_may_be_consumed_in_another_thread(loop: LoopThread) -> None:
    values = loop.iterate(Source(50))
    assert next(values) == 0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(list, values).result(SOON_S) == list(range(1, 50))


def test_many_at_once_from_many_threads(loop: LoopThread) -> None:
    def one(n: int) -> tuple[list[int], str]:
        return list(loop.iterate(Source(n))), loop.run(answer())

    with ThreadPoolExecutor(8) as pool:
        for n, (values, name) in enumerate(pool.map(one, range(40))):
            assert (values, name) == (list(range(n)), "test-loop")


async def test_many_at_once_from_one_event_loop(loop: LoopThread) -> None:
    async def one(n: int) -> list[int]:
        return [value async for value in loop.aiterate(Source(n))]

    assert await asyncio.gather(*map(one, range(40))) == [list(range(n)) for n in range(40)]


@pytest.mark.parametrize("wait", [lambda loop: loop.run(answer()), lambda loop: next(loop.iterate(Source(1)))])
def test_waiting_on_the_loops_own_thread_raises(loop: LoopThread, wait: Callable[[LoopThread], object]) -> None:
    async def inside() -> None:
        wait(loop)

    with pytest.raises(RuntimeError, match="its own event loop"):
        loop.run(inside())
    assert loop.run(answer()) == "test-loop"


# The end.


def test_stop_is_idempotent_and_final(loop: LoopThread) -> None:
    loop.run(answer())
    loop.stop()
    loop.stop()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(EngineClosed):
        loop.run(answer())
    with pytest.raises(EngineClosed):
        next(loop.iterate(Source(1)))


async def test_after_stop_async_callers_get_the_same_error(loop: LoopThread) -> None:
    loop.stop()
    with pytest.raises(EngineClosed):
        await anext(loop.aiterate(Source(1)))


def test_stop_ends_what_runs_and_tells_who_waits(loop: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()
    source = Source()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(loop.run, forever(started, ended))
        iterating = pool.submit(list, loop.iterate(source))
        assert started.wait(SOON_S) and source.started.wait(SOON_S)
        loop.stop()
        assert ended.is_set() and source.ended.is_set()
        for waiting in (running, iterating):
            with pytest.raises(EngineClosed):
                waiting.result(SOON_S)


async def test_stop_is_no_cancellation_of_async_callers(loop: LoopThread) -> None:
    source = Source()

    async def consume() -> None:
        async for _ in loop.aiterate(source):
            pass

    task = asyncio.create_task(consume())
    assert await asyncio.to_thread(source.started.wait, SOON_S)
    await asyncio.to_thread(loop.stop)
    with pytest.raises(EngineClosed):
        await asyncio.wait_for(task, SOON_S)
    assert not task.cancelled()


def test_work_given_while_stopping_never_hangs() -> None:
    """Every caller gets results and then EngineClosed, wherever the stop falls between its steps."""
    ends: list[BaseException] = []

    def call(loop: LoopThread, use: Callable[[LoopThread], object]) -> None:
        try:
            while True:
                use(loop)
        except BaseException as error:
            ends.append(error)

    uses: list[Callable[[LoopThread], object]] = [lambda on: on.run(answer()), lambda on: list(on.iterate(Source(2)))]
    for _ in range(20):
        loop = LoopThread("test-loop")
        callers = [threading.Thread(target=call, args=(loop, use), daemon=True) for use in uses * 2]
        for caller in callers:
            caller.start()
        time.sleep(0.002)
        loop.stop()
        for caller in callers:
            caller.join(SOON_S)
            assert not caller.is_alive()
    assert {type(error) for error in ends} == {EngineClosed}
    assert len(ends) == 20 * len(uses) * 2
