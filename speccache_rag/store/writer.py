"""The background writer: captures on their way to a slower tier."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from speccache_rag.errors import StoreError, StoreUnavailable
from speccache_rag.store.base import Done
from speccache_rag.types import ChunkKey, ChunkKV

logger = logging.getLogger(__name__)

WRITERS = 2
"""Threads. Encoding and checksums run outside the interpreter's lock, and one encodes while the other waits for the
disk."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    kv: ChunkKV
    done: list[Done]


class BackgroundWriter:
    """Writes chunks on its own threads, oldest first. At most `max_bytes` wait or are being written; more is refused.

    Args:
        write: stores one chunk and returns its stored size in bytes.
        max_bytes: the limit. A single chunk over it is taken while nothing else waits.
    """

    def __init__(self, write: Callable[[ChunkKey, ChunkKV], int], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[ChunkKey, _Waiting] = OrderedDict()
        self._writing: dict[ChunkKey, _Waiting] = {}
        self._bytes = self.dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._threads: list[threading.Thread] = []

    def offer(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        """Take a chunk over, to be written; False where too much waits, and the chunk counts as dropped.

        A key that waits or is being written is not written twice; both callers are told.
        """
        with self._changed:
            if (same := self._waiting.get(key) or self._writing.get(key)) is not None:
                same.done.append(done)
                return True
            if self._closing or (self._bytes and self._bytes + kv.nbytes > self._max_bytes):
                self.dropped += 1
                return False
            self._waiting[key] = _Waiting(kv, [done])
            self._bytes += kv.nbytes
            if len(self._threads) < WRITERS:
                thread = threading.Thread(target=self._run, name="speccache-writer", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return True

    def holds(self, key: ChunkKey) -> bool:
        """Whether the chunk waits to be written, or is being written."""
        with self._changed:
            return key in self._waiting or key in self._writing

    def discard(self, key: ChunkKey) -> bool:
        """Call off a write; one that runs is waited for. Whether the chunk was waiting."""
        with self._changed:
            while key in self._writing:
                self._changed.wait()
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._bytes -= waiting.kv.nbytes
        if waiting is not None:
            _tell(waiting, StoreUnavailable(f"Chunk {key} was deleted before it was written.", hint=""))
        return waiting is not None

    def close(self) -> None:
        """Write what waits, then end the threads. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                key, item = self._waiting.popitem(last=False)
                self._writing[key] = item
            try:
                result: int | StoreError = self._write(key, item.kv)
            except StoreError as error:
                result = error
            except Exception as error:  # whoever waits for this capture must be told, and the others still written
                logger.exception("chunk %s could not be written", key[:12])
                result = StoreUnavailable(f"Chunk {key} could not be written: {error!r}.")
            with self._changed:
                del self._writing[key]
                self._bytes -= item.kv.nbytes
                self._changed.notify_all()
            _tell(item, result)


def _tell(item: _Waiting, result: int | StoreError) -> None:
    for done in item.done:
        done(result)
