"""One event loop on one thread, so that sync, async, notebook and threaded callers share one engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from speccache_rag.errors import EngineClosed, EngineForked

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class LoopThread:
    """Runs coroutines and async iterators on its own loop for callers anywhere else.

    A caller that stops early (closes its iterator, is cancelled, is interrupted) cancels its work here. Everybody who
    waits when the loop is stopped, or comes later, gets EngineClosed; whoever comes in a forked process, where there is
    no such thread, gets EngineForked.
    """

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._stopped = False
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
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            raise self._cancelled() from None
        except BaseException:
            if future.cancel():  # interrupted: the work had not ended
                self._catch_up()
            raise

    async def run_from_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which belongs to this loop, on another one.

        Raises:
            EngineClosed: the loop was stopped.
        """
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled() and self._stopped:
                raise self._cancelled() from None
            raise

    def _catch_up(self) -> None:
        """Wait until the loop knows of a cancellation, so that it starts no more of that work."""
        with contextlib.suppress(EngineClosed, TimeoutError):
            self._submit(asyncio.sleep(0)).result(timeout=5)

    def iterate(self, source: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        """`source()`, consumed here, as an iterator for a thread. Nothing runs before the first `next`."""
        items: queue.SimpleQueue[_Item[T] | _End] = queue.SimpleQueue()
        pump = self._submit(self._pump(source, items.put))
        pump.add_done_callback(lambda done: items.put(self._end(done)))
        try:
            while isinstance(item := items.get(), _Item):
                yield item.value
                self._check_process()
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()

    async def aiterate(self, source: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """`source()`, consumed here, as an async iterator for another event loop."""
        consumer = asyncio.get_running_loop()
        items: asyncio.Queue[_Item[T] | _End] = asyncio.Queue()

        def emit(item: _Item[T] | _End) -> None:
            # The consumer's loop may be gone, and then nobody waits.
            with contextlib.suppress(RuntimeError):
                consumer.call_soon_threadsafe(items.put_nowait, item)

        pump = self._submit(self._pump(source, emit))
        pump.add_done_callback(lambda done: emit(self._end(done)))
        try:
            while isinstance(item := await items.get(), _Item):
                yield item.value
            if item.error is not None:
                raise item.error
        finally:
            pump.cancel()

    @staticmethod
    async def _pump(source: Callable[[], AsyncGenerator[T, None]], emit: Callable[[_Item[T]], None]) -> None:
        async with contextlib.aclosing(source()) as stream:
            async for value in stream:
                emit(_Item(value))

    def _end(self, pump: Future[None]) -> _End:
        return _End(self._cancelled() if pump.cancelled() else pump.exception())

    def _cancelled(self) -> Exception:
        """What a caller is told whose work was cancelled, and not by the caller."""
        return EngineClosed("The engine was closed.") if self._stopped else CancelledError()

    def stop(self) -> None:
        """Cancel what runs, stop the loop and its thread. Idempotent."""
        self._check_process()
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            ended = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        ended.result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise EngineForked(f"The engine runs in process {self._process}; this is process {os.getpid()}, its fork.")

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("this would wait for its own event loop; await the coroutine instead")
        try:
            self._check_process()
        except EngineForked:
            work.close()
            raise
        # Under the lock, work is given either before `stop` looks for what to cancel, or never.
        with self._lock:
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise EngineClosed("The engine was closed.")
