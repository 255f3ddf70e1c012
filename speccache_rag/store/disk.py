"""The disk tier: one verified file for each chunk, shared by processes."""

from __future__ import annotations

import errno
import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speccache_rag.errors import ChunkCorrupted, StoreUnavailable
from speccache_rag.store.base import ChunkStore, StoreStats
from speccache_rag.store.codec import decode, encode
from speccache_rag.types import ChunkKey, ChunkKV

_KEY = re.compile(r"[0-9a-f]{64}")
_CHUNK_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY = ".tmp"
_WRITE_ATTEMPTS = 3


class DiskStore(ChunkStore):
    """Files `kv/<first two digits>/<key>.safetensors` under one folder.

    A file is written under a temporary name, synced and renamed, so that a reader, in whatever process, sees a whole
    file or none, and a killed writer leaves at most a temporary file that nobody reads and `check(fix=True)` removes.
    A file that does not verify moves to `quarantine/`.

    Raises:
        StoreUnavailable: the folder cannot be made or written.
        ValueError: (every method that takes a key) the key is not 64 hex digits.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._chunks = self.path / "kv"
        self._quarantined = self.path / "quarantine"
        self._hits = self._misses = self._corrupted = 0
        self._lock = threading.Lock()
        with self._faults("open"):
            self._chunks.mkdir(parents=True, exist_ok=True)
            self._quarantined.mkdir(exist_ok=True)
            probe = self._chunks / _temporary_name("probe")
            _write_synced(probe, b"probe")
            probe.unlink()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        path = self._file(key)
        kv: ChunkKV | None = None
        corrupted = False
        with self._faults("read"), suppress(FileNotFoundError):
            data = _read(path)
            try:
                kv = decode(data, key)
            except ChunkCorrupted:
                corrupted = True
                self._quarantine(path)
        with self._lock:
            self._hits += kv is not None
            self._misses += kv is None
            self._corrupted += corrupted
        return kv

    def put(self, key: ChunkKey, kv: ChunkKV) -> int:
        path = self._file(key)
        with self._faults("write"):
            with suppress(FileNotFoundError):
                return path.stat().st_size
            data = encode(key, kv)
            path.parent.mkdir(exist_ok=True)
            for _ in range(_WRITE_ATTEMPTS):
                temporary = path.with_name(_temporary_name(key))
                try:
                    _write_synced(temporary, data)
                    os.replace(temporary, path)
                except FileNotFoundError:  # another process's check(fix=True) took it for a dead writer's
                    continue
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
                _sync_folder(path.parent)
                return len(data)
            raise FileNotFoundError(errno.ENOENT, "temporary files are removed while they are written", str(path))

    def contains(self, key: ChunkKey) -> bool:
        with self._faults("read"), suppress(FileNotFoundError):
            self._file(key).stat()
            return True
        return False

    def version(self, key: ChunkKey) -> str | None:
        """Changes whenever the chunk's file does; None where there is none."""
        with self._faults("read"), suppress(FileNotFoundError):
            stat = self._file(key).stat()
            return f"{stat.st_ino}-{stat.st_mtime_ns}-{stat.st_size}"
        return None

    def nbytes(self, key: ChunkKey) -> int:
        """Stored size; 0 where there is no such chunk."""
        with self._faults("read"), suppress(FileNotFoundError):
            return self._file(key).stat().st_size
        return 0

    def delete(self, key: ChunkKey) -> bool:
        with self._faults("write"), suppress(FileNotFoundError):
            self._file(key).unlink()
            return True
        return False

    def keys(self) -> Iterator[ChunkKey]:
        for path in self._files():
            if found := _CHUNK_FILE.fullmatch(path.name):
                yield ChunkKey(found[1])

    def stats(self) -> StoreStats:
        chunks = size = 0
        with self._faults("read"):
            for path in self._files():
                if _CHUNK_FILE.fullmatch(path.name):
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        size += path.stat().st_size
                        chunks += 1
        with self._lock:
            return StoreStats(chunks, size, self._hits, self._misses, self._corrupted)

    def check(self, fix: bool = False) -> list[str]:
        """Read and verify every file.

        `fix` moves chunks that do not verify to quarantine, and removes unfinished writes and what was in quarantine
        before. Files of other origin are reported and left alone.
        """
        problems = []
        with self._faults("check"):
            for path in sorted(self._quarantined.iterdir()):
                problems.append(f"{path}: quarantined, because it did not verify")
                if fix:
                    path.unlink(missing_ok=True)
            for path in self._files():
                if found := _CHUNK_FILE.fullmatch(path.name):
                    if problem := self._verify(path, ChunkKey(found[1]), fix):
                        problems.append(problem)
                elif path.suffix == _TEMPORARY:
                    problems.append(f"{path}: unfinished write of a process that died")
                    if fix:
                        path.unlink(missing_ok=True)
                else:
                    problems.append(f"{path}: not a file of this store")
        return problems

    def _verify(self, path: Path, key: ChunkKey, fix: bool) -> str | None:
        with suppress(FileNotFoundError):  # deleted since it was listed
            data = _read(path)
            try:
                decode(data, key)
            except ChunkCorrupted as error:
                if fix:
                    self._quarantine(path)
                return f"{path}: {error.message}"
        return None

    def _file(self, key: ChunkKey) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a chunk key: 64 hex digits")
        return self._chunks / key[:2] / f"{key}.safetensors"

    def _files(self) -> list[Path]:
        """Every file under `kv/`, whatever it is."""
        with self._faults("read"):
            return [Path(folder, name) for folder, _, names in os.walk(self._chunks, onerror=_raise) for name in names]

    def _quarantine(self, path: Path) -> None:
        self._quarantined.mkdir(exist_ok=True)
        os.replace(path, self._quarantined / f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")

    @contextmanager
    def _faults(self, action: str) -> Iterator[None]:
        """Turn an operating system error into StoreUnavailable."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            where = f" ({error.filename})" if error.filename else ""
            raise StoreUnavailable(f"Cannot {action} the store at {self.path}: {reason}{where}.") from error


def _temporary_name(stem: str) -> str:
    return f".{stem}.{uuid.uuid4().hex}{_TEMPORARY}"


def _read(path: Path) -> bytearray:
    """The whole file in a buffer that tensors may view."""
    with open(path, "rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view, done = memoryview(data), 0
        while done < len(data) and (n := file.readinto(view[done:])):
            done += n
    return data


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where folders can be opened for that."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
