from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.errors import StoreUnavailable
from speccache_rag.store import tiered
from speccache_rag.store.base import ChunkStore
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore
from speccache_rag.types import ChunkKey, ChunkKV
from tests.conftest import ROOT
from tests.contract.store_contract import (
    NAMESPACE,
    StoreContract,
    assert_same,
    await_ready,
    key_of,
    make_kv,
    put_soon,
)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(max_bytes=1 << 20)

    def damage(self, store: ChunkStore, key: ChunkKey) -> None:
        kv = store._entries[key].kv  # type: ignore[attr-defined]
        kv.values[1, 2] += 1

    def test_the_least_recently_used_leaves_first(self) -> None:
        kvs = [make_kv(seed=seed) for seed in range(3)]
        store = MemoryStore(max_bytes=2 * kvs[0].nbytes)
        store.put(key_of(kvs[0]), kvs[0])
        store.put(key_of(kvs[1]), kvs[1])
        store.get(key_of(kvs[0]))
        store.put(key_of(kvs[2]), kvs[2])
        assert set(store.keys()) == {key_of(kvs[0]), key_of(kvs[2])}
        assert store.stats().bytes == 2 * kvs[0].nbytes

    def test_an_entry_over_the_limit_names_both_numbers(self) -> None:
        kv = make_kv()
        store = MemoryStore(max_bytes=100)
        with pytest.raises(StoreUnavailable, match=rf"{kv.nbytes} bytes.*100 bytes.*ram_bytes"):
            store.put(key_of(kv), kv)
        assert store.stats().chunks == 0

    def test_works_under_inference_mode(self) -> None:
        store = MemoryStore(max_bytes=1 << 20)
        with torch.inference_mode():
            kv = make_kv()
            store.put(key_of(kv), kv)
            got = store.get(key_of(kv))
            assert_same(got, kv)
            assert got is not None
            got.keys.zero_()
            assert store.get(key_of(kv)) is None
        assert store.stats().corrupted == 1


def stored_files(store: DiskStore) -> list[Path]:
    return sorted(path for path in (store.path / "kv").rglob("*") if path.is_file())


class TestDiskStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> DiskStore:
        return DiskStore(tmp_path / "store")

    def damage(self, store: ChunkStore, key: ChunkKey) -> None:
        path = store._file(key)  # type: ignore[attr-defined]
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)

    def test_another_store_on_the_folder_sees_the_same(self, store: DiskStore) -> None:
        kv = make_kv()
        DiskStore(str(store.path)).put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)

    def test_a_truncated_file_is_a_counted_miss(self, store: DiskStore) -> None:
        kv = make_kv()
        store.put(key_of(kv), kv)
        os.truncate(store._file(key_of(kv)), 40)
        assert store.get(key_of(kv)) is None
        assert store.stats().corrupted == 1
        assert len(list((store.path / "quarantine").iterdir())) == 1

    def test_a_file_under_another_key_is_a_counted_miss(self, store: DiskStore) -> None:
        kv, other = make_kv(), key_of(make_kv(seed=1))
        store.put(key_of(kv), kv)
        store._file(other).parent.mkdir(parents=True, exist_ok=True)
        os.rename(store._file(key_of(kv)), store._file(other))
        assert store.get(other) is None
        assert store.stats().corrupted == 1

    @pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "a" * 64 + "/x"])
    def test_only_keys_name_files(self, store: DiskStore, key: str) -> None:
        for method in (store.get, store.contains, store.delete):
            with pytest.raises(ValueError, match="64 hex digits"):
                method(ChunkKey(key))
        with pytest.raises(ValueError, match="64 hex digits"):
            store.put(ChunkKey(key), make_kv())

    def test_unfinished_writes_are_ignored_then_removed(self, store: DiskStore) -> None:
        kv = make_kv()
        store.put(key_of(kv), kv)
        left = store.path / "tmp" / "of a dead writer"
        left.write_bytes(b"half")
        assert list(store.keys()) == [key_of(kv)]
        assert store.stats().chunks == 1
        assert store.check(fix=True) == [f"{left}: unfinished write of a process that died"]
        assert store.check() == []
        left.write_bytes(b"half")
        store.put(key_of(make_kv(seed=1)), make_kv(seed=1))
        assert not left.exists(), "the next writer tidies up"

    def test_foreign_files_are_reported_and_kept(self, store: DiskStore) -> None:
        foreign = store.path / "kv" / "notes.txt"
        foreign.write_text("mine")
        assert store.check(fix=True) == [f"{foreign}: not a file of this store"]
        assert foreign.exists()

    @pytest.mark.parametrize(
        ("code", "text"),
        [(errno.ENOSPC, "disk is full"), (errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only file system")],
    )
    def test_a_failed_write_raises_and_leaves_nothing(
        self, store: DiskStore, monkeypatch: pytest.MonkeyPatch, code: int, text: str
    ) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(code, os.strerror(code))

        kv = make_kv()
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailable, match=text) as caught:
            patch.setattr(os, "fsync", fail)
            store.put(key_of(kv), kv)
        assert str(store.path) in str(caught.value)
        assert stored_files(store) == []
        store.put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)

    def test_a_real_write_limit_raises_and_leaves_nothing(self, store: DiskStore) -> None:
        resource = pytest.importorskip("resource")
        kv, limit = make_kv(5000), 512 << 10  # the ledger fits, the chunk does not
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(StoreUnavailable, match="File too large"):
                store.put(key_of(kv), kv)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert stored_files(store) == []
        assert store.stats().bytes == 0

    def test_a_read_fault_raises(self, store: DiskStore) -> None:
        key = key_of(make_kv())
        store._file(key).mkdir(parents=True)
        with pytest.raises(StoreUnavailable, match="Cannot read the store"):
            store.get(key)

    def test_a_path_through_a_file_cannot_be_a_store(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreUnavailable, match="Cannot open the store at .*file/store") as caught:
            DiskStore(tmp_path / "file" / "store")
        assert "store=None" in str(caught.value)


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """An existing store folder that this process may not write, even where the tests run as root."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*(folder / name for name in ("kv", "tmp", "quarantine")), folder):
            path.mkdir(exist_ok=True)
            path.chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            for path in (folder, folder / "kv", folder / "tmp", folder / "quarantine"):
                path.chmod(0o755)


def test_a_read_only_folder_is_refused_at_once(read_only_folder: Path) -> None:
    with pytest.raises(StoreUnavailable, match="Permission denied") as caught:
        DiskStore(read_only_folder)
    assert str(read_only_folder) in str(caught.value)


KILLED_WRITERS = """
import os, signal, sys, time
import numpy as np
from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.store.disk import DiskStore
from speccache_rag.types import Chunk
from tests.contract.store_contract import NAMESPACE, key_of, make_kv

def write(folder, first_seed):
    store, catalogue = DiskStore(folder), Catalogue(folder + "/catalogue.sqlite")
    for seed in range(first_seed, 1_000_000):
        kv = make_kv(400, seed=seed)
        key = key_of(kv)
        store.put(key, kv)
        catalogue.add(NAMESPACE.digest, Chunk(key, f"text {seed}", kv.token_ids, np.zeros((400, 2), np.int32)))
        catalogue.put_scores(key, "scorer", np.full(400, seed, np.float32))

for turn, alive_s in enumerate((0.02, 0.05, 0.1, 0.2, 0.3)):
    writers = []
    for _ in range(2):  # on the same keys, so that they race too
        writers.append(os.fork())
        if not writers[-1]:
            write(sys.argv[1], 10_000 * turn)
    time.sleep(alive_s)
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the writer failed before it was killed"
"""


def test_killed_writers_leave_a_store_that_reads_without_error(tmp_path: Path) -> None:
    # A process of its own forks and kills them: one import of torch pays for all.
    subprocess.run([sys.executable, "-c", KILLED_WRITERS, str(tmp_path)], cwd=ROOT, check=True)
    store, catalogue = DiskStore(tmp_path), Catalogue(str(tmp_path / "catalogue.sqlite"))
    keys = list(store.keys())
    assert keys
    for key in keys:
        kv = store.get(key)
        assert kv is not None
        assert_same(kv, make_kv(400, seed=kv.token_ids[0]))
    chunks = list(catalogue.chunks(NAMESPACE.digest))
    assert chunks
    for chunk in chunks:
        assert store.contains(chunk.key)
        assert chunk.text == f"text {chunk.token_ids[0]}"
        scores = catalogue.scores(chunk.key, "scorer")
        assert scores is None or set(scores.tolist()) == {float(chunk.token_ids[0])}
    assert store.stats().corrupted == 0
    assert [line for line in store.check(fix=True) if "unfinished write" not in line] == []
    assert store.check() == []


class TestTieredStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        with TieredStore(DiskStore(tmp_path / "store"), MemoryStore(max_bytes=1 << 20)) as store:
            yield store

    @pytest.fixture
    def disk(self, tmp_path: Path) -> DiskStore:
        """Another process's view of the same folder."""
        return DiskStore(tmp_path / "store")

    def damage(self, store: ChunkStore, key: ChunkKey) -> None:
        """On disk, for a process that has not read it yet."""
        TestDiskStore().damage(store._disk, key)  # type: ignore[attr-defined]
        store._ram.delete(key)  # type: ignore[attr-defined]

    @pytest.fixture
    def reads(self, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> list[ChunkKey]:
        """Keys read from disk, in order."""
        read, keys = store._disk.get, []

        def counted(key: ChunkKey) -> object:
            keys.append(key)
            return read(key)

        monkeypatch.setattr(store._disk, "get", counted)
        return keys

    @pytest.fixture
    def slow(self, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowReads]:
        """Reads of this store wait for `go`."""
        slow = SlowReads(store._disk.get)
        monkeypatch.setattr(store._disk, "get", slow)
        yield slow
        slow.go.set()

    def test_what_was_captured_is_not_read_back(self, store: TieredStore, reads: list[ChunkKey]) -> None:
        kv, soon = make_kv(), make_kv(seed=1)
        store.put(key_of(kv), kv)
        put_soon(store, make_kv(seed=1))
        assert_same(store.get(key_of(kv)), kv)
        assert_same(store.get(key_of(soon)), soon)
        assert reads == []

    def test_the_disk_is_read_once(self, store: TieredStore, disk: DiskStore, reads: list[ChunkKey]) -> None:
        kv = make_kv()
        disk.put(key_of(kv), kv)
        for _ in range(3):
            assert_same(store.get(key_of(kv)), kv)
        assert reads == [key_of(kv)]

    def test_what_another_process_deletes_is_served_while_it_is_in_ram(
        self, store: TieredStore, disk: DiskStore
    ) -> None:
        kv = make_kv()
        store.put(key_of(kv), kv)
        disk.delete(key_of(kv))
        assert_same(store.get(key_of(kv)), kv)
        assert store.delete(key_of(kv))
        assert store.get(key_of(kv)) is None

    def test_a_chunk_larger_than_ram_is_read_each_time(self, tmp_path: Path) -> None:
        kv = make_kv()
        with TieredStore(DiskStore(tmp_path / "store"), MemoryStore(max_bytes=8)) as store:
            assert put_soon(store, make_kv()).result(timeout=30) == store.stats().bytes
            store.request([key_of(kv)])
            for _ in range(2):
                assert_same(store.get(key_of(kv)), kv)
            assert store.hidden_s() == 0.0, "each was read anew"

    def test_request_reads_ahead_and_counts_what_it_hid(
        self, store: TieredStore, disk: DiskStore, reads: list[ChunkKey]
    ) -> None:
        kvs = [make_kv(seed=seed) for seed in range(3)]
        for kv in kvs:
            disk.put(key_of(kv), kv)
        keys = [key_of(kv) for kv in kvs]
        store.request(keys)
        store.request(keys)
        await_ready(store, keys)
        assert sorted(reads) == sorted(keys)
        assert store.hidden_s() == 0.0
        for kv in kvs:
            assert_same(store.get(key_of(kv)), kv)
        assert len(reads) == 3
        assert store.hidden_s() > 0.0

    def test_a_chunk_asked_for_while_it_is_read_is_waited_for(
        self, store: TieredStore, disk: DiskStore, slow: SlowReads
    ) -> None:
        kv = make_kv()
        disk.put(key_of(kv), kv)
        store.request([key_of(kv)])
        assert slow.began.wait(timeout=30)
        assert not store.ready([key_of(kv)])
        with ThreadPoolExecutor(4) as pool:
            got = [pool.submit(store.get, key_of(kv)) for _ in range(4)]
            slow.go.set()
            for each in got:
                assert_same(each.result(timeout=30), kv)
        assert slow.reads == [key_of(kv)]

    def test_a_read_that_has_not_begun_is_called_off(
        self, store: TieredStore, disk: DiskStore, slow: SlowReads
    ) -> None:
        kvs = [make_kv(seed=seed) for seed in range(tiered.READERS + 1)]
        for kv in kvs:
            disk.put(key_of(kv), kv)
        slow.only = {key_of(kv) for kv in kvs[:-1]}
        store.request([key_of(kv) for kv in kvs])  # as many as there are readers, and one that waits
        assert_same(store.get(key_of(kvs[-1])), kvs[-1])

    def test_what_is_deleted_while_it_is_read_is_gone(
        self, store: TieredStore, disk: DiskStore, slow: SlowReads
    ) -> None:
        kv = make_kv()
        disk.put(key_of(kv), kv)
        store.request([key_of(kv)])
        assert slow.began.wait(timeout=30)
        running = store._reads[key_of(kv)]
        assert store.delete(key_of(kv))
        slow.go.set()
        running.result(timeout=30)
        assert store.get(key_of(kv)) is None

    def test_the_fault_of_a_read_is_for_get_to_meet(self, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = make_kv()
        with monkeypatch.context() as patch:
            patch.setattr(store._disk, "get", lambda key: (_ for _ in ()).throw(StoreUnavailable("gone")))
            store.request([key_of(kv)])
            await_ready(store, [key_of(kv)])
            with pytest.raises(StoreUnavailable, match="gone"):
                store.get(key_of(kv))
        store.put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)

    def test_what_is_not_there_is_looked_for_again_after_a_while(
        self, store: TieredStore, disk: DiskStore, reads: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = make_kv()
        for _ in range(2):
            store.request([key_of(kv)])
            await_ready(store, [key_of(kv)])
        assert len(reads) == 1
        disk.put(key_of(kv), kv)
        monkeypatch.setattr("speccache_rag.store.tiered.ABSENT_S", 0.0)
        store.request([key_of(kv)])
        await_ready(store, [key_of(kv)])
        assert_same(store.get(key_of(kv)), kv)

    def test_requests_nobody_takes_are_forgotten(self, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("speccache_rag.store.tiered.KEPT_READS", 2)
        keys = [key_of(make_kv(seed=seed)) for seed in range(5)]
        store.request(keys)
        await_ready(store, keys)
        store.request(keys[:1])
        assert len(store._reads) <= 3

    def test_what_left_ram_is_read_again(self, tmp_path: Path) -> None:
        kvs = [make_kv(seed=seed) for seed in range(2)]
        with TieredStore(DiskStore(tmp_path / "store"), MemoryStore(max_bytes=kvs[0].nbytes)) as store:
            for kv in kvs:
                store.put(key_of(kv), kv)
            for kv in (kvs[0], kvs[1], kvs[0]):
                store.request([key_of(kv)])
                await_ready(store, [key_of(kv)])
            assert list(store._ram.keys()) == [key_of(kvs[0])]

    def test_after_close_nothing_is_read_and_nothing_taken(self, store: TieredStore) -> None:
        store.close()
        store.request([key_of(make_kv())])
        assert not store.put_soon(key_of(make_kv()), make_kv(), print)


class SlowReads:
    """A reader whose reads (of `only` some keys) wait for `go`."""

    def __init__(self, read: Callable[[ChunkKey], ChunkKV | None]) -> None:
        self.read = read
        self.reads: list[ChunkKey] = []
        self.only: set[ChunkKey] | None = None
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, key: ChunkKey) -> ChunkKV | None:
        self.reads.append(key)
        self.began.set()
        if self.only is None or key in self.only:
            assert self.go.wait(timeout=30)
        return self.read(key)
