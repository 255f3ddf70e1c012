"""The composed store: RAM in front of disk, with threads that read ahead and write behind."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from speccache_rag.errors import StoreError
from speccache_rag.store.base import ChunkStore, Done, StoreStats
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.writer import BackgroundWriter
from speccache_rag.types import ChunkKey, ChunkKV

READERS = 4
"""Threads that read ahead. Reading and checksums run outside the interpreter's lock."""

KEPT_READS = 4096
"""Ended reads that nobody asked about are forgotten beyond this many."""

ABSENT_S = 1.0
"""Seconds for which `request` takes "not there", or a fault, for an answer; another process may store the chunk."""

FLUSH_EVERY_S = 5.0
"""How often the slower store makes last what it was told of uses in RAM."""

WRITE_BEHIND = 4
"""The RAM limit divided by this is how much may wait to be written, in addition to what RAM holds."""

LEAST_WRITE_BEHIND = 256 << 20
"""Bytes that may wait to be written in any case: a warm run offers several chunks at once."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a read found: KV (now in RAM, if it fits there), nothing, or a fault."""

    kv_bytes: int
    error: StoreError | None
    read_s: float
    at: float


_Read = Future[_Ended]


class TieredStore(ChunkStore):
    """A slower store whose chunks stay in RAM once they were read or captured.

    A chunk is verified when it is read; from then on RAM answers for it, and the slower store is not asked. KV is
    addressed by what it is made of, so a copy in RAM cannot be out of date.

    Args:
        disk: the slower store.
        ram: what stands in front of it. Both are taken over: closing this closes them.
    """

    def __init__(self, disk: ChunkStore, ram: MemoryStore) -> None:
        self._disk, self._ram = disk, ram
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="speccache-reader")
        self._writer = BackgroundWriter(disk.put, max(ram.max_bytes // WRITE_BEHIND, LEAST_WRITE_BEHIND))
        self._reads: OrderedDict[ChunkKey, _Read] = OrderedDict()
        self._hits = self._misses = 0
        self._hidden_s = 0.0
        self._flushed_at = time.perf_counter()
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        kv = self._ram.get(key)
        if kv is not None:
            self._disk.used(key)
            return self._counted(kv, self._hidden_by(key))
        started = time.perf_counter()
        read, mine = self._join(key)
        if mine:
            kv = self._read(key, read)
        ended = read.result()
        waited_s = time.perf_counter() - started
        self._forget(key, read)
        if ended.error is not None:
            self._counted(None)
            raise ended.error
        if mine or (kv := self._ram.get(key)) is not None:
            return self._counted(kv, max(0.0, ended.read_s - waited_s))
        # What does not fit in RAM, or has left it again, is read anew.
        return self._counted(self._disk.get(key) if ended.kv_bytes else None)

    def request(self, keys: Sequence[ChunkKey]) -> None:
        now = time.perf_counter()
        with self._lock:
            if now - self._flushed_at > FLUSH_EVERY_S:
                self._flushed_at = now
                self._submit(self._disk.flush)
            for key in keys:
                if self._ram.touch(key) or not _stale(self._reads.get(key), now):
                    continue
                read: _Read = Future()
                if not self._submit(self._read_ahead, key, read):
                    return
                self._reads.pop(key, None)
                self._reads[key] = read
            if (surplus := len(self._reads) - KEPT_READS) > 0:
                for key in [key for key, read in self._reads.items() if read.done()][:surplus]:
                    del self._reads[key]

    def ready(self, keys: Sequence[ChunkKey]) -> bool:
        with self._lock:
            return all((read := self._reads.get(key)) is None or read.done() for key in keys)

    def hidden_s(self) -> float:
        with self._lock:
            return self._hidden_s

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        stored = self._disk.put(key, kv)
        self._forget(key)
        if kv.nbytes <= self._ram.max_bytes:
            self._ram.put(key, kv)
        return stored

    def put_soon(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        if kv.n_tokens == 0:
            raise ValueError("a chunk without tokens has no KV to store")
        if not self._writer.offer(key, kv, done):
            return False
        self._ram.adopt(key, kv)
        self._forget(key)
        return True

    def contains(self, key: ChunkKey) -> bool:
        return self._ram.contains(key) or self._disk.contains(key)

    def delete(self, key: ChunkKey) -> bool:
        waiting = self._writer.discard(key)
        with self._lock:
            self._reads.pop(key, None)  # a read that runs keeps what it found to itself
            in_ram = self._ram.delete(key)
        return self._disk.delete(key) or waiting or in_ram

    def keys(self) -> Iterator[ChunkKey]:
        return self._disk.keys()

    def stats(self) -> StoreStats:
        """Chunks and bytes on disk."""
        disk = self._disk.stats()
        with self._lock:
            counts = self._hits, self._misses, disk.corrupted, self._writer.dropped
            return StoreStats(disk.chunks, disk.bytes, *counts)

    def check(self, fix: bool = False) -> list[str]:
        return self._ram.check(fix) + self._disk.check(fix)

    def close(self) -> None:
        """Write what waits, then free everything. Idempotent."""
        self._writer.close()
        self._readers.shutdown(cancel_futures=True)
        self._ram.close()
        self._disk.close()

    def _submit(self, work: Callable[..., None], *arguments: object) -> bool:
        try:
            self._readers.submit(work, *arguments)
        except RuntimeError:  # closed meanwhile: there is nothing left to be ready for
            return False
        return True

    def _counted(self, kv: ChunkKV | None, hidden_s: float = 0.0) -> ChunkKV | None:
        with self._lock:
            self._hits += kv is not None
            self._misses += kv is None
            self._hidden_s += hidden_s
        return kv

    def _hidden_by(self, key: ChunkKey) -> float:
        """Seconds that a chunk in RAM took to read, told once; 0 where it was not read ahead."""
        with self._lock:
            read = self._reads.get(key)
            if read is None or not read.done() or read.cancelled() or read.exception() is not None:
                return 0.0
            del self._reads[key]
            return read.result().read_s

    def _forget(self, key: ChunkKey, read: _Read | None = None) -> None:
        """Drop what an ended read found (where given, this one's): it was told, or there is news."""
        with self._lock:
            known = self._reads.get(key)
            if known is not None and known.done() and read in (None, known):
                del self._reads[key]

    def _join(self, key: ChunkKey) -> tuple[_Read, bool]:
        """The read of this chunk that runs, waits or has ended; or a new one, which is the caller's to do."""
        with self._lock:
            read = self._reads.get(key)
            # One that has not begun is called off: its turn may be far away.
            if read is not None and not read.cancel():
                return read, False
            read = Future()
            read.set_running_or_notify_cancel()
            self._reads[key] = read
            return read, True

    def _read_ahead(self, key: ChunkKey, read: _Read) -> None:
        if read.set_running_or_notify_cancel():
            self._read(key, read)

    def _read(self, key: ChunkKey, read: _Read) -> ChunkKV | None:
        """Bring a chunk from disk to RAM, and end `read` with what came of it."""
        started = time.perf_counter()
        kv, error = None, None
        try:
            kv = self._disk.get(key)
        except StoreError as fault:
            error = fault
        except BaseException as fault:
            read.set_exception(fault)
            raise
        if kv is not None:
            with self._lock:
                if self._reads.get(key) is read:  # else it was deleted meanwhile
                    self._ram.adopt(key, kv)
        now = time.perf_counter()
        read.set_result(_Ended(kv.nbytes if kv is not None else 0, error, now - started, now))
        return kv


def _stale(read: _Read | None, now: float) -> bool:
    """Whether a chunk that is not in RAM has to be read: nobody does, or what a read found is no answer any more."""
    if read is None or read.cancelled():
        return True
    if not read.done() or read.exception() is not None:
        return read.done()
    ended = read.result()
    return bool(ended.kv_bytes) or now - ended.at > ABSENT_S
