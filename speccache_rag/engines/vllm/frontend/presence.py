"""The front end's view of the store: which chunks have stored KV, without asking the worker."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from speccache_rag.store.disk import DiskStore
from speccache_rag.types import ChunkKey


class Presence:
    """Tells whose KV is stored. With a disk the disk knows, for all processes that share it.

    A store in RAM is the worker's. There this keeps account of what was captured, less what requests missed: a chunk
    that was evicted since is taken for present once, and recomputed as a hole.
    """

    def __init__(self, disk: DiskStore | None) -> None:
        """Take the disk over: closing this closes it."""
        self._disk = disk
        self._held: set[str] = set()
        self._lock = threading.Lock()

    @property
    def on_disk(self) -> bool:
        """Whether stored KV may have to be read before it is used."""
        return self._disk is not None

    def of(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)], one for each key."""
        if self._disk is not None:
            return np.array([self._disk.contains(key) for key in keys], dtype=bool)
        with self._lock:
            return np.array([key in self._held for key in keys], dtype=bool)

    def add(self, key: str) -> None:
        """A chunk was captured."""
        with self._lock:
            self._held.add(key)

    def remove(self, keys: Iterable[str]) -> None:
        """Chunks were missed."""
        with self._lock:
            self._held.difference_update(keys)

    def close(self) -> None:
        """Close the disk."""
        if self._disk is not None:
            self._disk.close()
