"""The catalogue of known chunks: their texts, tokens and cached importance scores, in SQLite."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag.chunks.anchor import UNFINDABLE, anchor_of
from speccache_rag.store.database import Database, Version
from speccache_rag.types import Chunk, ChunkKey

CATALOGUE_VERSION = 2

_PAGE = 1000
"""Rows read at once: what a reader holds the lock for."""

_SCHEMA = """
CREATE TABLE namespaces (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, about TEXT NOT NULL, longest INTEGER NOT NULL
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, anchor INTEGER NOT NULL, key TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL, token_ids BLOB NOT NULL, offsets BLOB NOT NULL
);
CREATE INDEX chunks_by_anchor ON chunks (namespace, anchor);
CREATE UNIQUE INDEX chunks_by_text ON chunks (namespace, anchor, text);
CREATE TABLE scores (
    key TEXT NOT NULL, scorer TEXT NOT NULL, scores BLOB NOT NULL, PRIMARY KEY (key, scorer)
) WITHOUT ROWID;
"""

_OF_NAMESPACE = "namespace = (SELECT id FROM namespaces WHERE digest = ?)"

TextRow = tuple[int, str]
"""Row number and text of a chunk."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known chunk without its tokens."""

    key: ChunkKey
    text: str
    n_tokens: int
    about: Mapping[str, str]
    """Of its namespace: model, tenant, dtype."""


class Catalogue:
    """What a fresh process needs to find known chunks in a prompt. Many threads and processes may share it.

    Texts are looked up by anchor (see chunks.anchor) and in the order of their characters, so that a reader needs to
    hold none of them in memory.

    Every method raises StoreUnavailable, naming the path and the cause, where SQLite fails.

    Args:
        path: the database file, made where missing; None keeps it in RAM.
    """

    def __init__(self, path: str | None = None) -> None:
        self._database = Database(None if path is None else Path(path), _SCHEMA, CATALOGUE_VERSION)

    def version(self) -> Version:
        """Changes whenever chunks may have been added or forgotten, by whatever process."""
        return self._database.data_version()

    # Writing.

    def describe(self, namespace_digest: str, about: Mapping[str, str]) -> None:
        """Note what a namespace is, for people; the first note stays."""
        with self._database.transaction() as connection:
            _namespace(connection, namespace_digest, about)

    def add(self, namespace_digest: str, chunk: Chunk) -> None:
        """Note a chunk; a known key, or a known text of the namespace, stays as it is."""
        self.add_many(namespace_digest, [chunk])

    def add_many(self, namespace_digest: str, chunks: Iterable[Chunk]) -> None:
        """`add` for many chunks: all of them or, where that fails, none."""
        with self._database.transaction() as connection:
            namespace = _namespace(connection, namespace_digest, {})
            longest = 0
            for c in chunks:
                row = namespace, anchor_of(c.text), c.key, c.text, _int32(np.asarray(c.token_ids)), _int32(c.offsets)
                connection.execute(
                    "INSERT OR IGNORE INTO chunks (namespace, anchor, key, text, token_ids, offsets)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                )
                longest = max(longest, len(c.text))
            connection.execute("UPDATE namespaces SET longest = max(longest, ?) WHERE id = ?", (longest, namespace))

    def put_scores(self, key: ChunkKey, scorer: str, scores: np.ndarray) -> None:
        """Keep a chunk's importance scores, float32 [T]; those of the same scorer are replaced."""
        blob = np.asarray(scores, "<f4").tobytes()
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", (key, scorer, blob))

    def forget(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks and their scores; how many were known."""
        rows = [(key,) for key in keys]
        with self._database.transaction() as connection:
            known = connection.executemany("DELETE FROM chunks WHERE key = ?", rows).rowcount
            connection.executemany("DELETE FROM scores WHERE key = ?", rows)
        if known:
            # Who asks for a document to go means its bytes too.
            self._database.scrub()
        return known

    # Reading.

    def chunks(self, namespace_digest: str) -> Iterator[Chunk]:
        """The chunks of a namespace, in the order they were added."""
        last = 0
        while True:
            with self._database.transaction(write=False) as connection:
                rows = connection.execute(
                    f"SELECT id, key, text, token_ids, offsets FROM chunks WHERE {_OF_NAMESPACE} AND id > ?"
                    " ORDER BY id LIMIT ?",
                    (namespace_digest, last, _PAGE),
                ).fetchall()
            for _, *row in rows:
                yield _chunk(*row)
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def known(self) -> Iterator[Known]:
        """Every chunk, in the order they were added."""
        last = 0
        while True:
            with self._database.transaction(write=False) as connection:
                rows = connection.execute(
                    "SELECT c.id, c.key, c.text, length(c.token_ids) / 4, n.about FROM chunks c"
                    " JOIN namespaces n ON n.id = c.namespace WHERE c.id > ? ORDER BY c.id LIMIT ?",
                    (last, _PAGE),
                ).fetchall()
            for _, key, text, n_tokens, about in rows:
                yield Known(ChunkKey(key), text, n_tokens, json.loads(about))
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def keys_of(self, names: Iterable[str], tenant: str | None = None) -> list[ChunkKey]:
        """The keys of chunks that are named by text or by key, in every namespace.

        Args:
            names: whole texts, or keys.
            tenant: whose chunks; "" is nobody's, None everybody's.
        """
        keys: list[ChunkKey] = []
        with self._database.transaction(write=False) as connection:
            about = connection.execute("SELECT id, about FROM namespaces").fetchall()
            namespaces = [number for number, facts in about if tenant in (None, json.loads(facts).get("tenant", ""))]
            for name in map(str.strip, names):
                for namespace in namespaces:
                    keys += connection.execute(
                        "SELECT key FROM chunks WHERE namespace = ? AND (key = ? OR anchor = ? AND text = ?)",
                        (namespace, name, anchor_of(name), name),
                    )
        return list(dict.fromkeys(ChunkKey(key) for (key,) in keys))

    def count(self, namespace_digest: str) -> int:
        """How many chunks a namespace has."""
        with self._database.transaction(write=False) as connection:
            query = f"SELECT count(*) FROM chunks INDEXED BY chunks_by_anchor WHERE {_OF_NAMESPACE}"
            found: int = connection.execute(query, (namespace_digest,)).fetchone()[0]
            return found

    def anchors(self, namespace_digest: str, after: int) -> tuple[np.ndarray, int, int]:
        """Anchors (int64) of the chunks added behind row `after`, the last row, and the longest text's characters."""
        with self._database.transaction(write=False) as connection:
            found = connection.execute(
                "SELECT id, longest FROM namespaces WHERE digest = ?", (namespace_digest,)
            ).fetchone()
            last = connection.execute("SELECT max(id) FROM chunks").fetchone()[0] or 0
            if found is None:
                return np.empty(0, np.int64), last, 0
            # All rows are read from the small index; few new ones by their numbers.
            index, condition = ("INDEXED BY chunks_by_anchor", "") if after == 0 else ("NOT INDEXED", " AND id > ?")
            rows = connection.execute(
                f"SELECT anchor FROM chunks {index} WHERE namespace = ?{condition}",
                (found[0], *([after] if after else [])),
            )
            anchors = np.fromiter((anchor for (anchor,) in rows), np.int64)
        return anchors[anchors != UNFINDABLE], last, found[1]

    def texts(self, namespace_digest: str, anchor: int, limit: int) -> list[TextRow]:
        """The first texts of an anchor, in the order of their characters."""
        return self._rows("ORDER BY text LIMIT ?", namespace_digest, anchor, limit)

    def text_below(self, namespace_digest: str, anchor: int, text: str) -> TextRow | None:
        """The last text of an anchor that is `text` or comes before it."""
        rows = self._rows("AND text <= ? ORDER BY text DESC LIMIT 1", namespace_digest, anchor, text)
        return rows[0] if rows else None

    def text_above(self, namespace_digest: str, anchor: int, text: str) -> TextRow | None:
        """The first text of an anchor that comes behind `text`."""
        rows = self._rows("AND text > ? ORDER BY text LIMIT 1", namespace_digest, anchor, text)
        return rows[0] if rows else None

    def row(self, number: int) -> Chunk | None:
        """The chunk of a row; None where it was forgotten meanwhile."""
        return self._one("id = ?", number)

    def find(self, namespace_digest: str, text: str) -> Chunk | None:
        """The chunk with exactly this text."""
        return self._one(f"{_OF_NAMESPACE} AND anchor = ? AND text = ?", namespace_digest, anchor_of(text), text)

    def scores(self, key: ChunkKey, scorer: str) -> np.ndarray | None:
        """The chunk's importance scores, float32 [T], None where this scorer has not scored it."""
        with self._database.transaction(write=False) as connection:
            row = connection.execute("SELECT scores FROM scores WHERE key = ? AND scorer = ?", (key, scorer)).fetchone()
        return None if row is None else np.frombuffer(row[0], "<f4").astype(np.float32)

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._database.close()

    def _rows(self, rest: str, namespace_digest: str, *values: Any) -> list[TextRow]:
        query = f"SELECT id, text FROM chunks WHERE {_OF_NAMESPACE} AND anchor = ? {rest}"
        with self._database.transaction(write=False) as connection:
            return connection.execute(query, (namespace_digest, *values)).fetchall()

    def _one(self, condition: str, *values: Any) -> Chunk | None:
        query = f"SELECT key, text, token_ids, offsets FROM chunks WHERE {condition}"
        with self._database.transaction(write=False) as connection:
            row = connection.execute(query, values).fetchone()
        return None if row is None else _chunk(*row)


def _namespace(connection: sqlite3.Connection, digest: str, about: Mapping[str, str]) -> int:
    """The number of a namespace, made where it is new."""
    row = digest, json.dumps(about, ensure_ascii=False)
    connection.execute("INSERT OR IGNORE INTO namespaces (digest, about, longest) VALUES (?, ?, 0)", row)
    number: int = connection.execute("SELECT id FROM namespaces WHERE digest = ?", (digest,)).fetchone()[0]
    return number


def _chunk(key: str, text: str, token_ids: bytes, offsets: bytes) -> Chunk:
    ids = tuple(np.frombuffer(token_ids, "<i4").tolist())
    return Chunk(ChunkKey(key), text, ids, np.frombuffer(offsets, "<i4").astype(np.int32).reshape(-1, 2))


def _int32(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()
