"""One event loop on one thread, so that sync, async, notebook and threaded callers share one engine."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from speccache_rag.errors import EngineClosed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class LoopThread:
    """Runs coroutines and async iterators on its own loop for callers anywhere else.

    A caller that stops early (closes its iterator, is cancelled, is interrupted) cancels its work here.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` from a thread.

        Raises:
            EngineClosed: the loop was stopped.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._open(work))
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` from another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._open(work)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` and do not wait for it; it must handle its own errors."""
        asyncio.run_coroutine_threadsafe(work, self._open(work))

    def iterate(self, source: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        """`source()`, consumed here, as an iterator for a thread. Nothing runs before the first `next`."""
        items: queue.SimpleQueue[_Item[T] | _End] = queue.SimpleQueue()
        work = self._pump(source, items.put)
        pump = asyncio.run_coroutine_threadsafe(work, self._open(work))
        try:
            while isinstance(item := items.get(), _Item):
                yield item.value
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()

    async def aiterate(self, source: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """`source()`, consumed here, as an async iterator for another event loop."""
        there = asyncio.get_running_loop()
        items: asyncio.Queue[_Item[T] | _End] = asyncio.Queue()

        def emit(item: _Item[T] | _End) -> None:
            there.call_soon_threadsafe(items.put_nowait, item)

        work = self._pump(source, emit)
        pump = asyncio.run_coroutine_threadsafe(work, self._open(work))
        try:
            while isinstance(item := await items.get(), _Item):
                yield item.value
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()

    @staticmethod
    async def _pump(source: Callable[[], AsyncGenerator[T, None]], emit: Callable[[_Item[T] | _End], None]) -> None:
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(source()) as stream:
                async for value in stream:
                    emit(_Item(value))
        except BaseException as caught:
            # Handed to the consumer, who raises it. A cancelled pump has no consumer any more.
            error = caught
            if isinstance(caught, asyncio.CancelledError):
                raise
        finally:
            # The consumer's loop may be gone, and then nobody waits.
            with contextlib.suppress(RuntimeError):
                emit(_End(error))

    def stop(self) -> None:
        """Cancel what runs, stop the loop and its thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed() or threading.current_thread() is self._thread:
            work.close()
            if self._loop.is_closed():
                raise EngineClosed("The engine was closed.")
            raise RuntimeError("this would wait for its own event loop; await the coroutine instead")
        return self._loop
