"""Missed chunks, captured again in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable

from speccache_rag.errors import EngineClosed, SpecCacheError
from speccache_rag.types import Chunk, ChunkKey

logger = logging.getLogger(__name__)


class Recaptures:
    """Captures missed chunks behind the anchor, in the background; a chunk whose capture runs is not begun again.

    KV recomputed in a prompt's context is not the chunk's own, so it cannot be kept instead.
    """

    def __init__(self, capture: Callable[[Chunk], Awaitable[object]], count: Callable[[bool], None]) -> None:
        self._capture = capture
        self._count = count
        self._running: set[ChunkKey] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
        self._lock = threading.Lock()

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Begin those that do not run yet; called on the engine's loop."""
        for chunk in chunks:
            with self._lock:
                if chunk.key in self._running:
                    continue
                self._running.add(chunk.key)
            task = asyncio.get_running_loop().create_task(self._one(chunk))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, chunk: Chunk) -> None:
        failed = False
        try:
            await self._capture(chunk)
        except EngineClosed:
            failed = True
            logger.debug("closed while chunk %s was captured again", chunk.key[:12])
        except SpecCacheError as error:
            failed = True
            logger.warning("chunk %s could not be captured again: %s", chunk.key[:12], error)
        finally:
            self._count(failed)
            with self._lock:
                self._running.discard(chunk.key)
