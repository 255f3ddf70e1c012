"""The catalogue of known chunks: their texts, tokens and cached importance scores, in SQLite."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from speccache_rag.errors import StoreUnavailable
from speccache_rag.types import Chunk, ChunkKey

_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0
_PAGE = 1000
"""Rows read at once: what a reader holds the lock for."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, namespace TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, offsets BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS chunks_by_namespace ON chunks (namespace);
CREATE TABLE IF NOT EXISTS scores (
    key TEXT NOT NULL, scorer TEXT NOT NULL, scores BLOB NOT NULL, PRIMARY KEY (key, scorer)
) WITHOUT ROWID;
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""


def _int32(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()


class Catalogue:
    """What a fresh process needs to find known chunks in a prompt. Many threads and processes may share it.

    Every method raises StoreUnavailable, naming the path and the cause, where SQLite fails.

    Args:
        path: the database file, made where missing; None keeps it in RAM.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._lock = threading.RLock()
        with self._faults():
            if path is not None:
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._connection = sqlite3.connect(path or ":memory:", timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            with self._faults():
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def add(self, namespace_digest: str, chunk: Chunk) -> None:
        """Note a chunk; a known key stays as it is."""
        self.add_many(namespace_digest, [chunk])

    def add_many(self, namespace_digest: str, chunks: Iterable[Chunk]) -> None:
        """`add` for many chunks: all of them or, where that fails, none."""
        rows = [(c.key, namespace_digest, c.text, _int32(np.asarray(c.token_ids)), _int32(c.offsets)) for c in chunks]
        with self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?)", rows)

    def chunks(self, namespace_digest: str) -> Iterator[Chunk]:
        """The chunks of a namespace, in the order they were added."""
        last = 0
        while True:
            with self._transaction() as connection:
                rows = connection.execute(
                    "SELECT rowid, key, text, token_ids, offsets FROM chunks"
                    " WHERE namespace = ? AND rowid > ? ORDER BY rowid LIMIT ?",
                    (namespace_digest, last, _PAGE),
                ).fetchall()
            for _, key, text, token_ids, offsets in rows:
                ids = tuple(np.frombuffer(token_ids, "<i4").tolist())
                yield Chunk(ChunkKey(key), text, ids, np.frombuffer(offsets, "<i4").astype(np.int32).reshape(-1, 2))
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def put_scores(self, key: ChunkKey, scorer: str, scores: np.ndarray) -> None:
        """Keep a chunk's importance scores, float32 [T]; those of the same scorer are replaced."""
        blob = np.asarray(scores, "<f4").tobytes()
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", (key, scorer, blob))

    def scores(self, key: ChunkKey, scorer: str) -> np.ndarray | None:
        """The chunk's importance scores, float32 [T], None where this scorer has not scored it."""
        with self._transaction() as connection:
            row = connection.execute("SELECT scores FROM scores WHERE key = ? AND scorer = ?", (key, scorer)).fetchone()
        return None if row is None else np.frombuffer(row[0], "<f4").astype(np.float32)

    def delete(self, key: ChunkKey) -> None:
        """Forget a chunk and its scores; an unknown key is fine."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM chunks WHERE key = ?", (key,))
            connection.execute("DELETE FROM scores WHERE key = ?", (key,))

    def close(self) -> None:
        """Close the database. Idempotent."""
        with self._lock, self._faults():
            self._connection.close()

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _SCHEMA_VERSION):
            raise StoreUnavailable(
                f"The catalogue at {self.path} has schema version {version}; this release knows {_SCHEMA_VERSION}.",
                hint="Use another store folder, or the release that wrote this one.",
            )
        if version == 0:
            self._connection.executescript(_SCHEMA)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._faults(), self._connection:
            yield self._connection

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn SQLite's errors into StoreUnavailable."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"The catalogue at {self.path or 'RAM'} failed: {error}.") from error
