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
"""Threads that prefetch. Reading and checksums run outside the interpreter's lock."""

KEPT_PREFETCHES = 1024
"""Prefetches of chunks that nobody asked for are forgotten beyond this many; RAM has its own limit."""


class TieredStore(ChunkStore):
    """A disk store whose chunks stay in RAM once they were read.

    The disk decides: a chunk that was deleted or rewritten there, by whatever process, is not served from RAM.
    """

    def __init__(self, disk: DiskStore, ram: MemoryStore) -> None:
        """Take both over: closing this closes them."""
        self._disk, self._ram = disk, ram
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="speccache-prefetch")
        self._prefetches: OrderedDict[ChunkKey, Future[float]] = OrderedDict()
        self._hits = self._misses = 0
        self._hidden_s = 0.0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        ahead_s = self._await_prefetch(key)
        ram_key = self._ram_key(key)
        kv = self._ram.get(ram_key) if ram_key is not None else None
        hidden_s = ahead_s if kv is not None else 0.0
        if kv is None and ram_key is not None:
            kv = self._read(key, ram_key)
        with self._lock:
            self._hidden_s += hidden_s
            self._hits += kv is not None
            self._misses += kv is None
        return kv

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                earlier = self._prefetches.pop(key, None)
                try:
                    self._prefetches[key] = self._readers.submit(self._prefetch_one, key, earlier)
                except RuntimeError:  # closed meanwhile: there is nothing left to be ready for
                    return
            while len(self._prefetches) > KEPT_PREFETCHES:
                self._prefetches.popitem(last=False)

    def hidden_s(self) -> float:
        with self._lock:
            return self._hidden_s

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        return self._disk.put(key, kv)

    def contains(self, key: ChunkKey) -> bool:
        return self._disk.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        if (ram_key := self._ram_key(key)) is not None:
            self._ram.delete(ram_key)
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

    def _ram_key(self, key: ChunkKey) -> ChunkKey | None:
        """The name in RAM of what the disk holds now; a rewritten file has another name."""
        version = self._disk.version(key)
        return None if version is None else ChunkKey(f"{key} {version}")

    def _read(self, key: ChunkKey, ram_key: ChunkKey) -> ChunkKV | None:
        kv = self._disk.get(key)
        if kv is not None and kv.nbytes <= self._ram.max_bytes:
            self._ram.put(ram_key, kv)
        return kv

    def _prefetch_one(self, key: ChunkKey, earlier: Future[float] | None) -> float:
        """Seconds of reading; where an earlier prefetch has done it, its. A fault is left for `get` to meet."""
        # Readers take their work in order, so the earlier one is done or running.
        earlier_s = earlier.result() if earlier is not None and not earlier.cancel() else 0.0
        started = time.perf_counter()
        try:
            ram_key = self._ram_key(key)
            if ram_key is None or self._ram.contains(ram_key):
                return earlier_s
            self._read(key, ram_key)
        except StoreError:
            pass
        return time.perf_counter() - started

    def _await_prefetch(self, key: ChunkKey) -> float:
        """Seconds that a prefetch of this chunk saves the caller. One that has not begun is called off."""
        with self._lock:
            prefetch = self._prefetches.pop(key, None)
        if prefetch is None or prefetch.cancel():
            return 0.0
        started = time.perf_counter()
        read_s = prefetch.result()
        return max(0.0, read_s - (time.perf_counter() - started))
