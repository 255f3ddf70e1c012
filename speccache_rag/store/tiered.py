"""RAM in front of disk: chunks that were read lately, and chunks that will be read soon."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from speccache_rag.errors import StoreError
from speccache_rag.store.base import ChunkStore, StoreStats
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import ChunkKey, ChunkKV

READERS = 4
"""Threads that read ahead. Reading and checksums run outside the interpreter's lock."""

KEPT_READINGS = 1024
"""Chunks read ahead and never asked for are forgotten beyond this many; RAM has its own limit."""


class TieredStore(ChunkStore):
    """A disk store whose chunks stay in RAM once they were read.

    The disk decides: a chunk that was deleted or rewritten there, by whatever process, is not served from RAM.
    """

    def __init__(self, disk: DiskStore, ram: MemoryStore) -> None:
        """Take both over: closing this closes them."""
        self._disk, self._ram = disk, ram
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="speccache-read")
        self._readings: OrderedDict[ChunkKey, Future[float]] = OrderedDict()
        self._hits = self._misses = 0
        self._hidden_s = 0.0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        self._await_reading(key)
        held = self._held(key)
        kv = self._ram.get(held) if held is not None else None
        if kv is None and held is not None:
            kv = self._read(key, held)
        with self._lock:
            self._hits += kv is not None
            self._misses += kv is None
        return kv

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                if key not in self._readings:
                    self._readings[key] = self._readers.submit(self._read_ahead, key)
            while len(self._readings) > KEPT_READINGS:
                self._readings.popitem(last=False)

    def hidden_s(self) -> float:
        with self._lock:
            return self._hidden_s

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        return self._disk.put(key, kv)

    def contains(self, key: ChunkKey) -> bool:
        return self._disk.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        if (held := self._held(key)) is not None:
            self._ram.delete(held)
        return self._disk.delete(key)

    def keys(self) -> Iterator[ChunkKey]:
        return self._disk.keys()

    def stats(self) -> StoreStats:
        """Chunks and bytes on disk."""
        disk = self._disk.stats()
        with self._lock:
            return StoreStats(disk.chunks, disk.bytes, self._hits, self._misses, disk.corrupted)

    def check(self, fix: bool = False) -> list[str]:
        return self._disk.check(fix)

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._ram.close()
        self._disk.close()

    def _held(self, key: ChunkKey) -> ChunkKey | None:
        """The name in RAM of what the disk holds now; a rewritten file has another name."""
        version = self._disk.version(key)
        return None if version is None else ChunkKey(f"{key} {version}")

    def _read(self, key: ChunkKey, held: ChunkKey) -> ChunkKV | None:
        kv = self._disk.get(key)
        if kv is not None and kv.nbytes <= self._ram.max_bytes:
            self._ram.put(held, kv)
        return kv

    def _read_ahead(self, key: ChunkKey) -> float:
        """Seconds it took. A fault is left for `get` to meet."""
        started = time.perf_counter()
        try:
            held = self._held(key)
            if held is not None and not self._ram.contains(held):
                self._read(key, held)
        except StoreError:
            pass
        return time.perf_counter() - started

    def _await_reading(self, key: ChunkKey) -> None:
        with self._lock:
            reading = self._readings.pop(key, None)
        if reading is None or reading.cancelled():
            return
        started = time.perf_counter()
        read_s = reading.result()
        waited_s = time.perf_counter() - started
        with self._lock:
            self._hidden_s += max(0.0, read_s - waited_s)
