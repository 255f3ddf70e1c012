"""A SQLite file that threads and processes share, and that may be deleted and made again under them."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccache_rag.errors import StoreUnavailable

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 30.0

NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "beegfs", "fuse.sshfs", "fuse.s3fs")
"""Beginnings of the types on which SQLite's write-ahead log, which needs memory shared by all processes, is unsafe."""


Version = tuple[int, int, int]
"""Of the data: number of the connection, changes through others, changes through this one."""


class Database:
    """Connections to one database; each method of its owner runs in one `transaction`.

    Args:
        path: the file, made with mode 0600 where missing, its folder with 0700; None keeps it in RAM.
        schema: statements that make the tables.
        version: of the schema. A file of a newer one is refused; what an older one holds is dropped, because a new
            version means that its rows mean nothing any more.

    Raises:
        StoreUnavailable: (here and in every transaction) SQLite fails; the message names the path and the cause.
    """

    def __init__(self, path: Path | None, schema: str, version: int) -> None:
        self.path = path
        self._schema = schema
        self._version = version
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int, int] | None = None
        self._closed = False
        self._connections = self._writes = 0
        with self._faults():
            self._connection = self._connect()

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """The connection, alone: all that is done with it happens, or, where an error is raised, nothing."""
        with self._lock, self._faults():
            connection = self._current()
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield connection
                connection.execute("COMMIT")
                self._writes += write
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def data_version(self) -> Version:
        """Changes with every change to the data, whoever makes it."""
        with self._lock, self._faults():
            changed: int = self._current().execute("PRAGMA data_version").fetchone()[0]
            return self._connections, changed, self._writes

    def scrub(self) -> None:
        """Leave nothing of deleted rows in the files."""
        with self._lock, self._faults():
            self._current().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock, self._faults():
            self._closed = True
            if self._connection is not None and self._identity == self._found():
                self._connection.close()
            self._connection = None

    def _current(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if self._closed:
            raise sqlite3.ProgrammingError("it is closed")
        # Written through the old connection, everything would vanish with the deleted file it still holds.
        if self._connection is None or self._identity != self._found():
            if self._connection is not None and self._identity is not None and self._identity[0] == os.getpid():
                self._connection.close()
            self._connection = None
            self._connection = self._connect()
        return self._connection

    def _found(self) -> tuple[int, int, int] | None:
        """Process, device and inode. A connection must not be used on the other side of a fork."""
        if self.path is None:
            return 0, 0, 0  # there is nothing on disk to share: a fork has a copy
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        return os.getpid(), stat.st_dev, stat.st_ino

    def _connect(self) -> sqlite3.Connection:
        if self.path is not None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its side files the mode of the main one.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        # A connection is used by one thread at a time, whichever holds the lock.
        connection = sqlite3.connect(
            self.path or ":memory:", timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._identity = self._found()
        self._connections += 1
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        if self.path is not None:
            kind = filesystem(self.path)
            if kind.startswith(NETWORK_FILESYSTEMS):
                logger.warning(
                    "%s is on a network filesystem (%s): SQLite runs without its write-ahead log, which is slower.",
                    self.path,
                    kind,
                )
                connection.execute("PRAGMA journal_mode = DELETE")
            else:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > self._version:
            raise StoreUnavailable(
                f"{self.path} has format version {version}; this release knows {self._version}.",
                hint="Use another store folder, or the release that wrote this one.",
            )
        if version < self._version:
            self._make(connection)

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make the tables, unless another process was quicker."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] < self._version:
                of_old = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                for (name,) in of_old:
                    if not name.startswith("sqlite_"):
                        connection.execute(f'DROP TABLE "{name}"')
                for statement in _statements(self._schema):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self._version}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn SQLite's errors into StoreUnavailable."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnavailable(f"The database at {self.path or 'RAM'} failed: {error}.") from error
        except OSError as error:
            raise StoreUnavailable(f"The database at {self.path} failed: {error.strerror or error}.") from error


def _statements(schema: str) -> Iterator[str]:
    """The statements of a schema one by one, for `executescript` would end the transaction."""
    statement = ""
    for line in schema.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds `path`, such as "ext4" or "nfs4"; empty where the system does not say."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    where = os.path.realpath(path)
    found, best = "", ""
    for line in mounts.splitlines():
        _, mounted, kind, *_ = line.split(" ")
        point = mounted.encode().decode("unicode_escape")  # a space is written \040
        if len(point) >= len(best) and os.path.commonpath([where, point]) == point:
            found, best = kind, point
    return found
