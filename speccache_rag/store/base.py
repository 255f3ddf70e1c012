"""The key of a chunk's KV, and the contract of a store tier."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import numpy as np
from typing_extensions import Self

from speccache_rag.config import KvDtype
from speccache_rag.errors import StoreError
from speccache_rag.types import ChunkKey, ChunkKV

FORMAT_VERSION = 2
"""Part of every key: raised with any change to the meaning of stored bytes, which then count as misses."""


@dataclass(frozen=True)
class Namespace:
    """All that a chunk's KV depends on besides its own tokens. Chunks of two namespaces never meet."""

    fingerprint: str
    """Digest of the target model: config, tokenizer, weights and quantization."""
    dtype: str
    rope: str
    """RoPE parameters as canonical JSON."""
    anchor_ids: tuple[int, ...]
    tenant: str | None = None
    kv_dtype: KvDtype = "auto"
    """How KV is stored; what was rounded is another chunk than what was not."""

    @cached_property
    def digest(self) -> str:
        """64 hex digits, the same in every process."""
        tenant = [] if self.tenant is None else [self.tenant.encode()]
        facts = [self.fingerprint.encode(), self.dtype.encode(), self.rope.encode(), self.kv_dtype.encode()]
        parts = [*facts, _ids(self.anchor_ids), *tenant]
        return _digest([str(FORMAT_VERSION).encode(), *parts])

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The key of the chunk with these target tokens: 16 hex digits for the tenant, 48 for all the rest."""
        return ChunkKey(self._tenant_digits + _digest([self.digest.encode(), _ids(token_ids)])[16:])

    @cached_property
    def _tenant_digits(self) -> str:
        # In the key, so that a disk tier can give each tenant a folder and needs to be told no more than keys.
        return _digest([] if self.tenant is None else [self.tenant.encode()])[:16]


def _ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i8").tobytes()


def _digest(parts: Sequence[bytes]) -> str:
    """blake2b over the parts, each behind its length, so that no two lists of parts read the same."""
    state = hashlib.blake2b(digest_size=32, person=b"speccache-rag")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds now, and what `get` met since it was opened."""

    chunks: int
    bytes: int
    hits: int
    misses: int
    """Corrupted chunks are misses too."""
    corrupted: int
    dropped: int = 0
    """Captures that `put_soon` refused because too many were waiting to be written."""


Done = Callable[[int | StoreError], None]
"""Told what became of a `put_soon`: the stored size in bytes, or why the chunk could not be stored."""


class ChunkStore(ABC):
    """Chunk KV by key. Safe to use from many threads.

    A miss is None, a fault raises, corruption is put out of the way and counted as a miss.
    """

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The chunk's KV, on the CPU; treat it as read-only. None where it is missing or does not verify.

        Raises:
            StoreUnavailable: the store cannot be read.
        """

    @abstractmethod
    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        """Keep a chunk's KV and return its stored size in bytes. A key that is present stays as it is.

        Raises:
            StoreUnavailable: it cannot be written; nothing of it is left behind.
            ValueError: the KV has no tokens, or a dtype the codec does not know.
        """

    @abstractmethod
    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is present; its bytes are not verified."""

    def request(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to bring these chunks into RAM, on threads of the store; returns at once, raises nothing.

        A chunk that is in RAM, or on its way, costs a look and counts as used just now. Calling it again and again
        while a prompt waits is right.
        """
        return None

    def ready(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether no read of these chunks is running or waiting; touches no disk.

        Then `get` answers from RAM, with KV, a miss or the fault that the read met, for all that RAM can hold at once.
        """
        return True

    def put_soon(self, key: ChunkKey, kv: ChunkKV, done: Done) -> bool:
        """`put` for those who cannot wait: into RAM before it returns, onto disk by a thread of the store.

        The tensors are the store's from now on: they are not copied where they need not be.

        Args:
            key: the chunk.
            kv: its KV.
            done: called once, on any thread, perhaps before this returns; never called where this returns False.

        Returns:
            False where too much waits to be written: the chunk is dropped, and counted in `stats`.

        Raises:
            ValueError: as `put`.
        """
        try:
            result: int | StoreError = self.put(key, kv)
        except StoreError as error:
            result = error
        done(result)
        return True

    def hidden_s(self) -> float:
        """Seconds so far that `request` saved those who called `get`."""
        return 0.0

    def used(self, key: ChunkKey) -> None:
        """Note that a nearer place answered for this chunk; touches no disk."""
        return None

    def flush(self) -> None:
        """Make what was noted last; may touch the disk, raises nothing."""
        return None

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk; False where it was not present."""

    def delete_many(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks; how many were present."""
        return sum(self.delete(key) for key in keys)

    @abstractmethod
    def keys(self) -> Iterator[ChunkKey]:
        """The keys present, in no order."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counts and bytes; may take time in proportion to the number of chunks."""

    @abstractmethod
    def check(self, fix: bool = False) -> list[str]:
        """Verify everything; one line for each problem found. `fix` removes what the store itself left behind."""

    def close(self) -> None:
        """Free what the store holds open. Idempotent."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
