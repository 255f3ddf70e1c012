"""The one thread that runs a model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ModelThread:
    """Does one piece of work at a time: what an answer waits for first, background work when nothing else waits."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._urgent: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._background: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T], *, background: bool = False) -> Future[T]:
        """Have a piece of work done.

        Raises:
            RuntimeError: after `shutdown`, or at the interpreter's end.
        """
        future: Future[T] = Future()
        with self._lock:
            # The executor is told how much work there is; which piece is next is decided when its turn comes.
            self._executor.submit(self._next)
            (self._background if background else self._urgent).append((future, work))
        return future

    def shutdown(self) -> None:
        """Take no more work; what was submitted is still done, and nobody waits for it."""
        self._executor.shutdown(wait=False)

    def _next(self) -> None:
        with self._lock:
            future, work = (self._urgent or self._background).popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # as an executor does: it belongs to whoever waits for the result
            future.set_exception(error)
        else:
            future.set_result(result)
