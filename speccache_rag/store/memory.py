"""The RAM tier."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from speccache_rag.errors import StoreError, StoreUnavailable
from speccache_rag.store.base import ChunkStore, Done, StoreStats
from speccache_rag.types import ChunkKey, ChunkKV


@dataclass(frozen=True, slots=True)
class _Entry:
    kv: ChunkKV
    versions: tuple[int, int]

    @property
    def intact(self) -> bool:
        return _versions(self.kv) == self.versions


class MemoryStore(ChunkStore):
    """Chunk KV in RAM, at most `max_bytes` of it; the least recently used chunk leaves first.

    Entries are private, and `get` hands them out without a copy. A caller that writes into what it got
    has corrupted the entry; torch counts such writes, so the next `get` sees it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()
        self._bytes = self._hits = self._misses = self._corrupted = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.intact:
                self._corrupted += 1
                self._remove(key)
                entry = None
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry.kv

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        return self._put(key, kv, copy=True)

    def put_soon(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        try:
            result: int | StoreError = self._put(key, kv, copy=False)
        except StoreError as error:
            result = error
        done(result)
        return True

    def adopt(self, key: ChunkKey, kv: ChunkKV) -> None:
        """`put` without a copy where the tensors allow it, and without an error where `kv` is over the limit."""
        if kv.nbytes <= self.max_bytes:
            self._put(key, kv, copy=False)

    def touch(self, key: ChunkKey) -> bool:
        """Count a chunk as used just now; whether it is here."""
        with self._lock:
            if key not in self._entries:
                return False
            self._entries.move_to_end(key)
            return True

    def _put(self, key: ChunkKey, kv: ChunkKV, *, copy: bool) -> int:
        if kv.n_tokens == 0:
            raise ValueError("a chunk without tokens has no KV to store")
        if kv.nbytes > self.max_bytes:
            raise StoreUnavailable(
                f"The KV of chunk {key} takes {kv.nbytes} bytes; the RAM store is limited to {self.max_bytes} bytes.",
                hint="Raise ram_bytes, or split the text into smaller chunks.",
            )
        if self.contains(key):
            return kv.nbytes
        entry = _entry(kv, copy)
        with self._lock:
            if key not in self._entries:
                while self._bytes + kv.nbytes > self.max_bytes:
                    self._remove(next(iter(self._entries)))
                self._entries[key] = entry
                self._bytes += kv.nbytes
        return kv.nbytes

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            return key in self._entries

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._remove(key)

    def keys(self) -> Iterator[ChunkKey]:
        with self._lock:
            return iter(list(self._entries))

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self._entries), self._bytes, self._hits, self._misses, self._corrupted)

    def check(self, fix: bool = False) -> list[str]:
        with self._lock:
            damaged = [key for key, entry in self._entries.items() if not entry.intact]
            if fix:
                for key in damaged:
                    self._corrupted += 1
                    self._remove(key)
        return [f"Chunk {key} was written to by a reader." for key in damaged]

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _remove(self, key: ChunkKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.kv.nbytes
        return entry is not None


def _entry(kv: ChunkKV, copy: bool) -> _Entry:
    # Tensors made under inference mode do not count writes; what is made here does.
    with torch.inference_mode(False), torch.no_grad():
        keys, values = (_copied(t) if copy else _adopted(t) for t in (kv.keys, kv.values))
    kept = ChunkKV(keys, values, kv.token_ids, kv.position)
    return _Entry(kept, _versions(kept))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _adopted(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that counts writes; a copy where it is not contiguous or not on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return _copied(tensor)
    flat = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


def _versions(kv: ChunkKV) -> tuple[int, int]:
    return kv.keys._version, kv.values._version
