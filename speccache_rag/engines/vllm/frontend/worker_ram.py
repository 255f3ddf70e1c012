"""What the worker's RAM tier holds, as far as the front end can tell."""

from __future__ import annotations

from collections.abc import Sequence

from speccache_rag.store.disk import DiskStore
from speccache_rag.types import ChunkKey


class WorkerRam:
    """Chunks the worker was told to prefetch, as many bytes of them as its RAM tier takes.

    A call wakes vLLM's worker, which then spins on a core for a second: not for what its RAM holds anyway.
    """

    def __init__(self, disk: DiskStore, max_bytes: int) -> None:
        self._disk = disk
        self._max_bytes = max_bytes
        self._sizes: dict[ChunkKey, int] = {}  # oldest first

    def add(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Note these chunks; returns those that are stored and were not noted, which the worker is to be told of."""
        new = {key: size for key in keys if key not in self._sizes and (size := self._disk.nbytes(key))}
        self._sizes |= new
        while sum(self._sizes.values()) > self._max_bytes:
            del self._sizes[next(iter(self._sizes))]
        return list(new)

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """The worker was not told after all."""
        for key in keys:
            self._sizes.pop(key, None)
