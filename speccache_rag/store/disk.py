"""The disk tier: one verified file for each chunk, shared by processes, within a budget."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from speccache_rag.config import KvDtype
from speccache_rag.errors import ChunkCorrupted, StoreError, StoreUnavailable
from speccache_rag.store.base import ChunkStore, StoreStats
from speccache_rag.store.codec import LARGEST_CHUNK, decode, encode, expected_size
from speccache_rag.store.folder import StoreFolder
from speccache_rag.store.ledger import Ledger, Page, StoredFile
from speccache_rag.types import ChunkKey, ChunkKV

logger = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")
_CHUNK_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_TENANT = 16
"""Hex digits of a key that its tenant decides (see store.base.Namespace)."""

KEPT_FREE = 10
"""Without a budget, new chunks push out old ones where less than one part in this many of the filesystem is free."""

QUARANTINED = 8
"""Files kept in quarantine, the newest."""

NOTED_EVERY_S = 5.0
"""Uses are written to the ledger this often: a write for each would cost more than it tells."""


class DiskStore(ChunkStore):
    """Files `kv/<tenant>/<two digits>/<key>.safetensors` under one folder, counted in `ledger.sqlite`.

    A reader, in whatever process, sees a whole file or none. A killed writer leaves at most a file in `tmp/`, which
    nobody reads and the next writer removes. A file that does not verify moves to `quarantine/`.

    One process writes at a time. It counts a chunk before it writes it, and removes old files before either, so that
    the files under `kv/` never exceed the budget, whoever dies when.

    Args:
        path: the folder.
        max_bytes: the budget; None leaves a tenth of the filesystem free.
        secret: what checksums are keyed with; files written with another one do not verify.
        kv_dtype: how new files hold KV; files of every kind are read.
        largest: bytes of the largest file that is read; one that says it is larger does not verify.

    Raises:
        StoreUnavailable: the folder cannot be made or written, or a newer release wrote it.
        ValueError: (every method that takes a key) the key is not 64 hex digits.
    """

    def __init__(
        self,
        path: str | Path,
        max_bytes: int | None = None,
        *,
        secret: bytes | None = None,
        kv_dtype: KvDtype = "auto",
        largest: int = LARGEST_CHUNK,
    ) -> None:
        self.path = Path(path).expanduser()
        self.max_bytes = max_bytes
        self._secret = secret
        self._kv_dtype = kv_dtype
        self._largest = largest
        self._folder = StoreFolder(self.path)
        self._ledger = Ledger(self.path / "ledger.sqlite")
        self._uses: dict[ChunkKey, tuple[int, float]] = {}
        self._noted_at = time.monotonic()
        self._hits = self._misses = self._corrupted = 0
        self._lock = threading.Lock()
        with self._ledger.reading() as page:
            counted, _ = page.total()
        if not counted:
            self._adopt_files()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        path = self._file(key)
        kv: ChunkKV | None = None
        corrupted = False
        with self._folder.faults("read"), suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            try:
                kv = decode(self._read(file.fileno(), key), key, self._secret)
            except ChunkCorrupted as error:
                corrupted = True
                logger.warning("speccache: %s is put into quarantine: %s", path, error.message)
                self._quarantine(path, os.fstat(file.fileno()).st_ino)
        with self._lock:
            self._hits += kv is not None
            self._misses += kv is None
            self._corrupted += corrupted
        if kv is not None:
            self.used(key)
            if time.monotonic() - self._noted_at > NOTED_EVERY_S:
                self.flush()
        return kv

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        path = self._file(key)
        if size := self.nbytes(key):
            self.used(key)
            return size
        data = encode(key, kv, self._secret, self._kv_dtype)
        with self._folder.faults("write"), self._alone():
            if size := self.nbytes(key):  # somebody else was quicker
                return size
            self._reserve(key, len(data))
            try:
                self._folder.write(path, data)
            except BaseException:
                self._uncount([key])
                raise
            with self._ledger.changing() as page:
                page.complete(key)
        return len(data)

    def contains(self, key: ChunkKey) -> bool:
        return self.nbytes(key) > 0

    def nbytes(self, key: ChunkKey) -> int:
        """Stored size; 0 where there is no such chunk."""
        with self._folder.faults("read"), suppress(FileNotFoundError):
            return self._file(key).stat().st_size
        return 0

    def used(self, key: ChunkKey) -> None:
        with self._lock:
            n, _ = self._uses.get(key, (0, 0.0))
            self._uses[key] = n + 1, time.time()

    def flush(self) -> None:
        try:
            with self._ledger.changing() as page:
                self._note(page)
        except StoreError as error:  # what is lost decides no more than which chunk leaves first
            logger.warning("uses of chunks were not noted: %s", error)

    def delete(self, key: ChunkKey) -> bool:
        return self.delete_many([key]) == 1

    def delete_many(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks and their pins; how many were present."""
        paths = [self._file(key) for key in keys]
        with self._folder.faults("write"), self._alone(), self._ledger.changing() as page:
            page.unpin(keys)
            page.remove(keys)
            return sum(_unlink(path) for path in paths)

    def pin(self, keys: Sequence[ChunkKey]) -> None:
        """Never remove these chunks to make room, whether they are stored already or later."""
        with self._ledger.changing() as page:
            page.pin(keys)

    def unpin(self, keys: Sequence[ChunkKey]) -> None:
        """Undo `pin`."""
        with self._ledger.changing() as page:
            page.unpin(keys)

    def files(self) -> list[StoredFile]:
        """What the ledger says of every chunk, the least recently used first."""
        with self._ledger.changing() as page:
            self._note(page)
            return list(page.files())

    def keys(self) -> Iterator[ChunkKey]:
        with self._folder.faults("read"):
            for path in self._folder.files():
                if found := _CHUNK_FILE.fullmatch(path.name):
                    yield ChunkKey(found[1])

    def stats(self) -> StoreStats:
        with self._ledger.reading() as page:
            chunks, size = page.total()
        with self._lock:
            return StoreStats(chunks, size, self._hits, self._misses, self._corrupted)

    def check(self, fix: bool = False) -> list[str]:
        """Read and verify every file, and compare the ledger with what is there.

        `fix` moves chunks that do not verify to quarantine, empties it of what was there before, removes unfinished
        writes, and corrects the ledger. Files of other origin are reported and left alone.
        """
        problems = []
        with self._folder.faults("check"):
            self._folder.make()
            for path in sorted(self._folder.quarantine.iterdir()):
                problems.append(f"{path}: quarantined, because it did not verify")
                if fix:
                    path.unlink(missing_ok=True)
            for path in sorted(self._folder.files()):
                found = _CHUNK_FILE.fullmatch(path.name)
                if found is None or path != self._file(ChunkKey(found[1])):
                    problems.append(f"{path}: not a file of this store")
                elif problem := self._verify(path, ChunkKey(found[1]), fix):
                    problems.append(problem)
            problems += self._check_books(fix)
        return problems

    def close(self) -> None:
        if self._uses:
            self.flush()
        self._ledger.close()

    # Room.

    def _reserve(self, key: ChunkKey, size: int) -> None:
        """Count a file that will be written, and remove others until it fits."""
        with self._ledger.changing() as page:
            self._note(page)
            _, held = page.total()
            if self.max_bytes is not None:
                surplus = held + size - self.max_bytes
                if surplus > held - page.pinned_bytes():
                    raise StoreUnavailable(
                        f"A chunk of {size} bytes does not fit: the disk budget of the store at {self.path} is "
                        f"{self.max_bytes} bytes, {page.pinned_bytes()} of them pinned.",
                        hint="Raise disk_bytes, or unpin chunks.",
                    )
            else:
                disk = shutil.disk_usage(self.path)
                surplus = size if disk.free - size < disk.total // KEPT_FREE else 0
            for victim in (victims := page.victims(surplus)):
                _unlink(self._file(victim))
            page.remove(victims)
            page.add(key, size, time.time(), complete=False)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The only writer, with what dead ones left behind out of the way."""
        with self._folder.alone():
            for path in self._folder.leftovers():
                path.unlink(missing_ok=True)
            with self._ledger.reading() as page:
                unfinished = page.incomplete()
            if unfinished:
                with self._ledger.changing() as page:
                    page.remove(key for key in unfinished if not self.nbytes(key))
                    for key in unfinished:
                        page.complete(key)
            yield

    def _note(self, page: Page) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            self._noted_at = time.monotonic()
        page.use(uses)

    def _uncount(self, keys: Iterable[ChunkKey]) -> None:
        with self._ledger.changing() as page:
            page.remove(keys)

    def _adopt_files(self) -> None:
        """Count files that a ledger, new or made again, does not know."""
        with self._folder.faults("open"), self._folder.alone(), self._ledger.changing() as page:
            for key in self.keys():
                if size := self.nbytes(key):
                    page.add(key, size, time.time(), complete=True)

    # Verification.

    def _read(self, descriptor: int, key: ChunkKey) -> bytearray:
        """A whole file in a buffer that tensors may view. Nothing large is allocated for a header that lies."""
        size = os.fstat(descriptor).st_size
        expected = expected_size(lambda n: os.read(descriptor, n), key)
        if size != expected or size > self._largest:
            raise ChunkCorrupted(
                f"Stored chunk {key} has {size} bytes; its header says {expected}, and {self._largest} is the limit."
            )
        data = bytearray(size)
        view, done = memoryview(data), 0
        os.lseek(descriptor, 0, os.SEEK_SET)
        while done < size and (n := os.readv(descriptor, [view[done:]])):
            done += n
        return data

    def _verify(self, path: Path, key: ChunkKey, fix: bool) -> str | None:
        with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:  # or deleted since it was listed
            try:
                decode(self._read(file.fileno(), key), key, self._secret)
            except ChunkCorrupted as error:
                if fix:
                    self._quarantine(path, os.fstat(file.fileno()).st_ino)
                return f"{path}: {error.message}"
        return None

    def _check_books(self, fix: bool) -> list[str]:
        with self._folder.alone(), self._ledger.changing() as page:
            leftovers = self._folder.leftovers()
            problems = [f"{path}: unfinished write of a process that died" for path in leftovers]
            counted = {file.key: file.bytes for file in page.files()}
            there = {key: size for key in self.keys() if (size := self.nbytes(key))}
            wrong = {key for key in counted.keys() | there.keys() if counted.get(key) != there.get(key)}
            unfinished = set(page.incomplete())
            problems += [
                f"{self._file(key)}: counted as {counted.get(key, 0)} bytes, is {there.get(key, 0)}"
                for key in sorted(wrong - unfinished)
            ]
            if fix:
                for path in leftovers:
                    path.unlink(missing_ok=True)
                page.remove(wrong)
                for key in wrong & there.keys():
                    page.add(key, there[key], time.time(), complete=True)
        return problems

    def _file(self, key: ChunkKey) -> Path:
        checked_key(key)
        return self._folder.chunks / key[:_TENANT] / key[_TENANT : _TENANT + 2] / f"{key}.safetensors"

    def _quarantine(self, path: Path, inode: int) -> None:
        """Move a file away, unless another one took its place since it was read."""
        if path.stat().st_ino != inode:
            return
        folder = self._folder.quarantine
        os.replace(path, folder / f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")
        self._uncount([ChunkKey(path.stem)])
        kept = sorted(folder.iterdir(), key=_changed_at)
        for old in kept[:-QUARANTINED]:
            old.unlink(missing_ok=True)


def checked_key(key: ChunkKey) -> None:
    """Nothing but a key may become a part of a path.

    Raises:
        ValueError: it is not 64 hex digits.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a chunk key: 64 hex digits")


def _unlink(path: Path) -> bool:
    with suppress(FileNotFoundError):
        path.unlink()
        return True
    return False


def _changed_at(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_ctime
    return 0.0
