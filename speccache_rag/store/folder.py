"""The folder of a disk tier: private files, whole or not there, and a lock that all its processes share."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from speccache_rag.errors import StoreUnavailable

_LOCK_POLL_S = 0.005


class StoreFolder:
    """`kv/` holds chunks, `tmp/` what is being written, `quarantine/` what did not verify.

    Folders are made with mode 0700 and files with 0600: chunk KV tells as much as the text it was computed from.

    Raises:
        StoreUnavailable: the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chunks = path / "kv"
        self.temporary = path / "tmp"
        self.quarantine = path / "quarantine"
        self._threads = threading.Lock()
        self._processes = FileLock(path / "lock", mode=0o600, thread_local=False, poll_interval=_LOCK_POLL_S)
        with self.faults("open"):
            self.make()
            probe = self.temporary / uuid.uuid4().hex
            _write_synced(probe, b"probe")
            probe.unlink(missing_ok=True)

    def make(self) -> None:
        """Make the folders that are missing; somebody may have deleted them all."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.chunks, self.temporary, self.quarantine):
            folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The only writer, of all threads and processes. What is in `tmp/` then was left by the dead."""
        with self._threads:
            self.make()
            with self._processes:
                yield

    def leftovers(self) -> list[Path]:
        """Unfinished writes; call it while `alone`."""
        return sorted(self.temporary.iterdir())

    def write(self, path: Path, data: bytes) -> None:
        """Write a file so that a reader sees all of it or nothing; call it while `alone`."""
        temporary = self.temporary / uuid.uuid4().hex
        try:
            _write_synced(temporary, data)
            path.parent.parent.mkdir(mode=0o700, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def files(self) -> Iterator[Path]:
        """Every file under `kv/`, whatever it is."""
        for folder, _, names in os.walk(self.chunks, onerror=_raise):
            for name in names:
                yield Path(folder, name)

    @contextmanager
    def faults(self, action: str) -> Iterator[None]:
        """Turn an operating system error into StoreUnavailable."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            where = f" ({error.filename})" if error.filename else ""
            raise StoreUnavailable(f"Cannot {action} the store at {self.path}: {reason}{where}.") from error


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb", opener=_private) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
