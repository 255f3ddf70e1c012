from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from speccache_rag.errors import StoreUnavailable
from speccache_rag.store import database
from speccache_rag.store.database import Database, filesystem

SCHEMA = "CREATE TABLE names (name TEXT PRIMARY KEY);"


def names(database: Database) -> set[str]:
    with database.transaction(write=False) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM names")}


def add(database: Database, name: str) -> None:
    with database.transaction() as connection:
        connection.execute("INSERT INTO names VALUES (?)", (name,))


def test_an_error_undoes_the_transaction(tmp_path: Path) -> None:
    for path in (tmp_path / "db.sqlite", None):
        db = Database(path, SCHEMA, 1)
        with pytest.raises(KeyError), db.transaction() as connection:
            connection.execute("INSERT INTO names VALUES ('a')")
            raise KeyError
        add(db, "b")
        assert names(db) == {"b"}


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        db = Database(tmp_path / "new" / "db.sqlite", SCHEMA, 1)
        add(db, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert "db.sqlite-wal" in modes
    assert set(modes.values()) == {0o600}


def test_a_file_deleted_under_it_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "store" / "db.sqlite"
    ours, theirs = Database(path, SCHEMA, 1), Database(path, SCHEMA, 1)
    add(ours, "before")
    shutil.rmtree(tmp_path / "store")
    add(theirs, "after")
    assert names(ours) == {"after"}
    add(ours, "too")
    assert names(theirs) == {"after", "too"}


def test_a_fork_gets_a_connection_of_its_own(tmp_path: Path) -> None:
    db = Database(tmp_path / "db.sqlite", SCHEMA, 1)
    add(db, "parent")
    child = os.fork()
    if not child:
        add(db, "child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert names(db) == {"parent", "child"}


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    Database(path, SCHEMA, 9).close()
    with pytest.raises(StoreUnavailable, match=r"db.sqlite has format version 9; this release knows 1"):
        Database(path, SCHEMA, 1)


def test_a_network_filesystem_gets_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "filesystem", lambda path: "nfs4")
    with caplog.at_level(logging.WARNING):
        db = Database(tmp_path / "db.sqlite", SCHEMA, 1)
    assert "network filesystem (nfs4)" in caplog.text
    add(db, "a")
    with db.transaction(write=False) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert [path.name for path in tmp_path.iterdir()] == ["db.sqlite"]


def test_the_filesystem_of_a_path_is_that_of_the_nearest_mount() -> None:
    assert filesystem(Path("/proc/self")) == "proc"
    assert filesystem(Path("/")) != ""


def test_closed_twice_then_refuses(tmp_path: Path) -> None:
    db = Database(tmp_path / "db.sqlite", SCHEMA, 1)
    db.close()
    db.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        names(db)


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db.sqlite").write_bytes(b"no database " * 100)
    with pytest.raises(StoreUnavailable, match="file is not a database"):
        Database(tmp_path / "db.sqlite", SCHEMA, 1)


def test_a_locked_database_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    db = Database(tmp_path / "db.sqlite", SCHEMA, 1)
    other = sqlite3.connect(tmp_path / "db.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        add(db, "a")
    other.execute("ROLLBACK")
    other.close()
    add(db, "a")
