from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.errors import StoreUnavailable
from speccache_rag.types import Chunk, ChunkKey
from tests.conftest import ROOT


def make_chunk(name: str, n_tokens: int = 3) -> Chunk:
    offsets = np.array([(i, i + 1) for i in range(n_tokens)], dtype=np.int32)
    return Chunk(
        ChunkKey(name),
        f"text of {name}, 東京, and more than an anchor takes",
        tuple(range(100_000, 100_000 + n_tokens)),
        offsets,
    )


def assert_same(got: Chunk, expected: Chunk) -> None:
    assert (got.key, got.text, got.token_ids) == (expected.key, expected.text, expected.token_ids)
    assert got.offsets.dtype == np.int32
    np.testing.assert_array_equal(got.offsets, expected.offsets)


@pytest.fixture(params=["file", "ram"])
def catalogue(request: pytest.FixtureRequest, tmp_path: Path) -> Catalogue:
    return Catalogue(str(tmp_path / "store" / "catalogue.sqlite") if request.param == "file" else None)


def test_chunks_come_back_in_order_by_namespace(catalogue: Catalogue) -> None:
    chunks = [make_chunk(f"{i}", n_tokens=i % 5 + 1) for i in range(2500)]
    catalogue.add_many("ours", chunks)
    catalogue.add("theirs", make_chunk("other"))
    for got, expected in zip(catalogue.chunks("ours"), chunks, strict=True):
        assert_same(got, expected)
    assert [chunk.key for chunk in catalogue.chunks("theirs")] == ["other"]
    assert list(catalogue.chunks("nobody")) == []


def test_a_known_key_stays_as_it_is(catalogue: Catalogue) -> None:
    catalogue.add("ours", make_chunk("a"))
    catalogue.add("ours", make_chunk("a", n_tokens=9))
    (chunk,) = catalogue.chunks("ours")
    assert_same(chunk, make_chunk("a"))


def test_adding_while_reading(catalogue: Catalogue) -> None:
    catalogue.add_many("ours", [make_chunk(f"{i}") for i in range(1500)])
    seen = []
    for chunk in catalogue.chunks("ours"):
        seen.append(chunk.key)
        if len(seen) <= 500:
            catalogue.add("ours", make_chunk(f"later {len(seen)}"))
    assert len(set(seen)) == 2000


def test_scores_by_key_and_scorer(catalogue: Catalogue) -> None:
    key, scores = ChunkKey("a"), np.array([0.5, np.nan, -1.0, 1e-30], dtype=np.float32)
    assert catalogue.scores(key, "small") is None
    catalogue.put_scores(key, "small", np.zeros(2, np.float32))
    catalogue.put_scores(key, "small", scores)
    got = catalogue.scores(key, "small")
    assert got is not None
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, scores)
    got[0] = 9  # the caller owns it
    assert catalogue.scores(key, "other") is None
    assert catalogue.scores(ChunkKey("b"), "small") is None


def test_forget_leaves_neither_chunk_nor_scores(catalogue: Catalogue) -> None:
    for name in "ab":
        catalogue.add("ours", make_chunk(name))
        catalogue.put_scores(ChunkKey(name), "small", np.ones(3, np.float32))
    assert catalogue.forget([ChunkKey("a"), ChunkKey("unknown")]) == 1
    assert [chunk.key for chunk in catalogue.chunks("ours")] == ["b"]
    assert catalogue.scores(ChunkKey("a"), "small") is None
    assert catalogue.scores(ChunkKey("b"), "small") is not None


def test_a_failed_batch_adds_nothing(catalogue: Catalogue) -> None:
    textless = Chunk(ChunkKey("b"), "x", (1,), np.zeros((1, 2), np.int32))
    object.__setattr__(textless, "key", {})
    with pytest.raises(StoreUnavailable, match="not supported"):
        catalogue.add_many("ours", [make_chunk("a"), textless])
    assert list(catalogue.chunks("ours")) == []


def test_many_threads(catalogue: Catalogue) -> None:
    def work(i: int) -> None:
        catalogue.add("ours", make_chunk(f"{i % 20}"))
        catalogue.put_scores(ChunkKey(f"{i % 20}"), "small", np.full(3, i % 20, np.float32))
        scores = catalogue.scores(ChunkKey(f"{i % 20}"), "small")
        assert scores is not None
        assert scores.tolist() == [i % 20] * 3

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert len(list(catalogue.chunks("ours"))) == 20


def test_closed_twice_then_refuses(catalogue: Catalogue) -> None:
    catalogue.close()
    catalogue.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        catalogue.add("ours", make_chunk("a"))


def test_another_connection_sees_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "catalogue.sqlite")
    first, second = Catalogue(path), Catalogue(path)
    first.add("ours", make_chunk("a"))
    (chunk,) = second.chunks("ours")
    assert_same(chunk, make_chunk("a"))
    second.put_scores(chunk.key, "small", np.ones(3, np.float32))
    assert first.scores(chunk.key, "small") is not None


OPENED_AT_ONCE = """
import os, sys
import numpy as np
from speccache_rag.chunks.catalogue import Catalogue

writers = []
for name in range(6):
    writers.append(os.fork())
    if not writers[-1]:
        catalogue = Catalogue(sys.argv[1])
        for i in range(50):
            catalogue.put_scores(f"{name} {i}", "small", np.ones(3, np.float32))
        os._exit(0)
sys.exit(any(os.waitpid(writer, 0)[1] for writer in writers))
"""


def test_processes_may_open_and_write_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "catalogue.sqlite")
    subprocess.run([sys.executable, "-c", OPENED_AT_ONCE, path], cwd=ROOT, check=True)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM scores").fetchone() == (300,)
    connection.close()


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="file/catalogue.sqlite") as caught:
        Catalogue(str(tmp_path / "file" / "catalogue.sqlite"))
    assert "store=None" in str(caught.value)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="Is a directory"):
        Catalogue(str(tmp_path))


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    path.write_bytes(b"no database " * 100)
    with pytest.raises(StoreUnavailable, match="file is not a database") as caught:
        Catalogue(str(path))
    assert str(path) in str(caught.value)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "catalogue.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(StoreUnavailable, match="version 9; this release knows 2"):
        Catalogue(path)


def test_a_full_disk_raises_and_keeps_what_was_there(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path / "catalogue.sqlite"))
    catalogue.add("ours", make_chunk("a"))
    pages = catalogue._database._connection.execute("PRAGMA page_count").fetchone()[0]
    catalogue._database._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable, match="full"):
        catalogue.put_scores(ChunkKey("a"), "small", np.zeros(100_000, np.float32))
    (chunk,) = catalogue.chunks("ours")
    assert_same(chunk, make_chunk("a"))


def test_a_read_only_database_raises_on_writing(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path / "catalogue.sqlite"))
    catalogue.add("ours", make_chunk("a"))
    catalogue._database._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable, match="readonly"):
        catalogue.add("ours", make_chunk("b"))
    assert len(list(catalogue.chunks("ours"))) == 1


def test_what_an_older_release_wrote_is_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "catalogue.sqlite")
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE chunks (key TEXT); INSERT INTO chunks VALUES ('a'); PRAGMA user_version = 1;"
    )
    connection.close()
    catalogue = Catalogue(path)
    catalogue.add("ours", make_chunk("b"))
    assert [chunk.key for chunk in catalogue.chunks("ours")] == ["b"]


def test_nothing_of_a_forgotten_text_stays_in_the_files(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path / "catalogue.sqlite"))
    catalogue.add("ours", make_chunk("a secret"))
    catalogue.add("ours", make_chunk("another"))
    assert b"a secret" in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    catalogue.forget([ChunkKey("a secret")])
    assert b"a secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_what_is_known_and_by_which_model(catalogue: Catalogue) -> None:
    catalogue.describe("ours", {"model": "small", "tenant": "a"})
    catalogue.describe("ours", {"model": "another"})
    catalogue.add("ours", make_chunk("a", n_tokens=5))
    (known,) = catalogue.known()
    assert (known.key, known.n_tokens, known.about) == ("a", 5, {"model": "small", "tenant": "a"})
    catalogue.add("theirs", Chunk(ChunkKey("b"), make_chunk("a").text, (1,), np.zeros((1, 2), np.int32)))
    assert sorted(catalogue.keys_of([f" {known.text}\n", "unknown"])) == ["a", "b"]
