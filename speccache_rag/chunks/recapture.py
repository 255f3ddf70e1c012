"""The queue of missed chunks, captured in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from speccache_rag.config import Admission
from speccache_rag.errors import EngineClosed, SpecCacheError
from speccache_rag.types import Chunk, ChunkKey

T = TypeVar("T")

logger = logging.getLogger(__name__)

QUEUED = 256
"""Chunks that may wait; more are left out until they are missed again."""

AT_ONCE = 2
"""Captures that run side by side: a server's requests are to notice little of them."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
"""How long a chunk is left alone after its capture failed; each failure doubles it."""

REMEMBERED = 100_000
"""Chunks of which a miss or a failure is remembered."""


class Recaptures:
    """Captures missed chunks, each alone behind the anchor.

    KV recomputed in a prompt's context is not the chunk's own, so it cannot be kept instead.

    Args:
        capture: computes and stores one chunk's KV.
        count: told after each capture whether it failed.
        admission: which misses lead to a capture: the "first" of a chunk, its "second", or none ("warm"): a chunk that
            is asked for once in a while is not worth a prefill of its own and a file.
    """

    def __init__(
        self,
        capture: Callable[[Chunk], Awaitable[object]],
        count: Callable[[bool], None],
        admission: Admission = "second",
    ) -> None:
        self._capture = capture
        self._count = count
        self._admission = admission
        self._waiting: deque[Chunk] = deque()
        self._busy: set[ChunkKey] = set()
        """Chunks that wait or are being captured."""
        self._misses: OrderedDict[ChunkKey, int] = OrderedDict()
        self._failures: OrderedDict[ChunkKey, tuple[int, float]] = OrderedDict()
        """How often a capture failed, and until when it is not tried again."""
        self._workers = 0
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether no capture waits or runs."""
        with self._lock:
            return not self._busy

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Note that these chunks were missed, and capture those that are admitted; called on the engine's loop."""
        with self._lock:
            self._waiting.extend(chunk for chunk in chunks if self._admit(chunk.key))
            new = min(len(self._waiting), AT_ONCE - self._workers)
            self._workers += new
        for _ in range(new):
            task = asyncio.get_running_loop().create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _admit(self, key: ChunkKey) -> bool:
        if self._admission == "warm" or key in self._busy:
            return False
        misses = self._misses.pop(key, 0) + 1
        _remember(self._misses, key, misses)
        _, until = self._failures.get(key, (0, 0.0))
        if misses < (2 if self._admission == "second" else 1) or time.monotonic() < until or len(self._busy) >= QUEUED:
            return False
        self._busy.add(key)
        return True

    async def _work(self) -> None:
        """Capture what waits, one after the other."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._workers -= 1
                    return
                chunk = self._waiting.popleft()
            failed = True
            try:
                await self._capture(chunk)
                failed = False
            except EngineClosed:
                logger.debug("closed while chunk %s was captured", chunk.key[:12])
            except SpecCacheError as error:
                logger.warning("chunk %s could not be captured: %s", chunk.key[:12], error)
            except BaseException:  # cancelled, or a mistake of ours: this worker ends with it
                with self._lock:
                    self._workers -= 1
                raise
            finally:
                self._count(failed)
                with self._lock:
                    self._busy.discard(chunk.key)
                    self._note(chunk.key, failed)

    def _note(self, key: ChunkKey, failed: bool) -> None:
        failures, _ = self._failures.pop(key, (0, 0.0))
        if failed:
            pause_s = min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S)
            _remember(self._failures, key, (failures + 1, time.monotonic() + pause_s))


def _remember(table: OrderedDict[ChunkKey, T], key: ChunkKey, value: T) -> None:
    table[key] = value
    if len(table) > REMEMBERED:
        table.popitem(last=False)
