"""The ledger of a disk tier: the size of each file, when it was last used, and what must stay."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speccache_rag.store.database import Database
from speccache_rag.types import ChunkKey

LEDGER_VERSION = 1

CANDIDATES = 64
"""The largest of this many least recently used files leaves first, so that few files make much room."""

_SCHEMA = """
CREATE TABLE files (
    key TEXT PRIMARY KEY, bytes INTEGER NOT NULL, complete INTEGER NOT NULL,
    stored_at REAL NOT NULL, used_at REAL NOT NULL, uses INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX files_by_use ON files (used_at);
CREATE INDEX incomplete_files ON files (complete) WHERE complete = 0;
CREATE TABLE pins (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE total (files INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0, 0);
CREATE TRIGGER count_in AFTER INSERT ON files BEGIN
    UPDATE total SET files = files + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER count_out AFTER DELETE ON files BEGIN
    UPDATE total SET files = files - 1, bytes = bytes - old.bytes;
END;
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One row: a chunk's file, as far as the ledger knows. Times are seconds since the epoch."""

    key: ChunkKey
    bytes: int
    stored_at: float
    used_at: float
    uses: int
    pinned: bool


class Ledger:
    """Shared by processes. The disk tier writes a row before the file, so that what is counted is never too little.

    Every method raises StoreUnavailable where SQLite fails.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _SCHEMA, LEDGER_VERSION)

    @contextmanager
    def changing(self) -> Iterator[Page]:
        """A page to read and write on, in one transaction."""
        with self._database.transaction() as connection:
            yield Page(connection)

    @contextmanager
    def reading(self) -> Iterator[Page]:
        """A page to read from: one moment's rows."""
        with self._database.transaction(write=False) as connection:
            yield Page(connection)

    def close(self) -> None:
        self._database.close()


class Page:
    """The rows, inside one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def total(self) -> tuple[int, int]:
        """Files and bytes."""
        files, size = self._connection.execute("SELECT files, bytes FROM total").fetchone()
        return files, size

    def add(self, key: ChunkKey, size: int, now: float, *, complete: bool) -> None:
        """Count a file; one that is counted already is counted anew."""
        self.remove([key])
        row = (key, size, complete, now, now, 0)
        self._connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)

    def complete(self, key: ChunkKey) -> None:
        """The file is there now."""
        self._connection.execute("UPDATE files SET complete = 1 WHERE key = ?", (key,))

    def incomplete(self) -> list[ChunkKey]:
        """Files that were about to be written."""
        rows = self._connection.execute("SELECT key FROM files WHERE complete = 0")
        return [ChunkKey(key) for (key,) in rows]

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        self._connection.executemany("DELETE FROM files WHERE key = ?", [(key,) for key in keys])

    def use(self, uses: Mapping[ChunkKey, tuple[int, float]]) -> None:
        """Add to the uses of files, and note when the last was."""
        self._connection.executemany(
            "UPDATE files SET uses = uses + ?, used_at = max(used_at, ?) WHERE key = ?",
            [(n, at, key) for key, (n, at) in uses.items()],
        )

    def victims(self, size: int) -> list[ChunkKey]:
        """Files whose removal frees `size` bytes, none of them pinned; fewer where there are no more."""
        rows = self._connection.execute(
            "SELECT key, bytes FROM files WHERE complete AND key NOT IN (SELECT key FROM pins) ORDER BY used_at"
        )
        chosen: list[ChunkKey] = []
        while size > 0 and (oldest := rows.fetchmany(CANDIDATES)):
            for key, freed in sorted(oldest, key=lambda row: -int(row[1])):
                if size <= 0:
                    break
                chosen.append(ChunkKey(key))
                size -= freed
        return chosen

    def pin(self, keys: Collection[ChunkKey]) -> None:
        self._connection.executemany("INSERT OR IGNORE INTO pins VALUES (?)", [(key,) for key in keys])

    def unpin(self, keys: Collection[ChunkKey]) -> None:
        self._connection.executemany("DELETE FROM pins WHERE key = ?", [(key,) for key in keys])

    def pinned_bytes(self) -> int:
        row = self._connection.execute("SELECT sum(bytes) FROM files WHERE key IN (SELECT key FROM pins)").fetchone()
        return row[0] or 0

    def files(self) -> Iterator[StoredFile]:
        """Every row, oldest use first."""
        for row in self._connection.execute(
            "SELECT key, bytes, stored_at, used_at, uses, key IN (SELECT key FROM pins) FROM files ORDER BY used_at"
        ):
            key, size, stored_at, used_at, uses, pinned = row
            yield StoredFile(ChunkKey(key), size, stored_at, used_at, uses, bool(pinned))
