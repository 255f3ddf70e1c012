"""The disk tier's budget, pins, isolation and what it does about hostile files."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from speccache_rag.errors import StoreUnavailable
from speccache_rag.store import disk
from speccache_rag.store.base import FORMAT_VERSION, Namespace
from speccache_rag.store.codec import encode
from speccache_rag.store.disk import DiskStore
from speccache_rag.types import ChunkKey
from tests.conftest import ROOT
from tests.contract.store_contract import assert_same, key_of, make_kv

KVS = [make_kv(seed=seed) for seed in range(12)]
KEYS = [key_of(kv) for kv in KVS]
SIZE = len(encode(KEYS[0], KVS[0])) + 8
"""Of one stored chunk; headers differ by a byte or two."""


def on_disk(store: DiskStore) -> int:
    return sum(path.stat().st_size for path in (store.path / "kv").rglob("*") if path.is_file())


def fill(store: DiskStore, numbers: range | list[int]) -> None:
    for n in numbers:
        store.put(KEYS[n], KVS[n])


def test_the_least_recently_used_leaves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccache_rag.store.ledger.CANDIDATES", 1)
    store = DiskStore(tmp_path, 3 * SIZE)
    fill(store, [0, 1, 2])
    store.get(KEYS[0])
    store.used(KEYS[1])  # a nearer tier answered
    fill(store, [3])
    assert set(store.keys()) == {KEYS[0], KEYS[1], KEYS[3]}
    assert store.stats().bytes == on_disk(store) <= 3 * SIZE
    assert {file.key: file.uses for file in store.files()} == {KEYS[0]: 1, KEYS[1]: 1, KEYS[3]: 0}


def test_among_the_oldest_the_largest_leaves_first(tmp_path: Path) -> None:
    large = make_kv(60, seed=100)
    store = DiskStore(tmp_path, 1 << 20)
    fill(store, [0, 1])
    store.put(key_of(large), large)
    fill(store, [2])
    store.max_bytes = on_disk(store)
    fill(store, [3, 4])
    assert set(store.keys()) == {KEYS[n] for n in range(5)}


def test_pins_stay_and_a_budget_full_of_pins_is_an_error_that_says_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3 * SIZE)
    store.pin(KEYS[:2])  # before they are stored: nothing may evict them in between
    fill(store, range(6))
    assert {KEYS[0], KEYS[1]} <= set(store.keys())
    store.pin(KEYS[:6])
    with pytest.raises(StoreUnavailable, match=r"does not fit.*budget.*pinned.*disk_bytes"):
        fill(store, [7])
    assert {file.key for file in store.files() if file.pinned} == set(store.keys())
    store.unpin(KEYS[:6])
    fill(store, [7])
    assert store.contains(KEYS[7])


def test_a_chunk_over_the_budget_evicts_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 3 * SIZE)
    fill(store, range(3))
    large = make_kv(500, seed=200)
    with pytest.raises(StoreUnavailable, match="does not fit"):
        store.put(key_of(large), large)
    assert len(list(store.keys())) == 3


def test_a_lower_budget_is_reached_with_the_next_write(tmp_path: Path) -> None:
    fill(DiskStore(tmp_path), range(8))
    store = DiskStore(tmp_path, 2 * SIZE)
    fill(store, [9])
    assert on_disk(store) <= 2 * SIZE
    assert store.contains(KEYS[9])


def test_without_a_budget_a_full_filesystem_replaces_old_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path)
    fill(store, range(4))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=usage.total // 100))
    fill(store, range(4, 8))
    assert len(list(store.keys())) in (3, 4)
    assert store.contains(KEYS[7])


def test_another_store_on_the_folder_keeps_the_same_budget(tmp_path: Path) -> None:
    ours, theirs = DiskStore(tmp_path, 4 * SIZE), DiskStore(tmp_path, 4 * SIZE)
    for n in range(0, 12, 2):
        fill(ours, [n])
        fill(theirs, [n + 1])
        assert on_disk(ours) <= 4 * SIZE
    assert ours.check() == []


def test_a_failed_write_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 3 * SIZE)
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        fill(store, [0])
    assert store.stats().bytes == 0
    assert store.check() == []


def test_a_lost_ledger_is_written_anew(tmp_path: Path) -> None:
    fill(DiskStore(tmp_path), range(4))
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()
    store = DiskStore(tmp_path, 2 * SIZE)
    assert store.stats().chunks == 4
    fill(store, [5])
    assert on_disk(store) <= 2 * SIZE


def test_check_corrects_the_ledger(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    fill(store, range(3))
    store._file(KEYS[0]).unlink()
    with store._ledger.changing() as page:
        page.remove([KEYS[1]])
    problems = store.check(fix=True)
    assert [str(store._file(key)) in "".join(problems) for key in KEYS[:3]] == [True, True, False]
    assert store.check() == []
    assert store.stats().bytes == on_disk(store)


def test_a_folder_deleted_under_a_live_store_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = DiskStore(folder)
    fill(store, range(2))
    shutil.rmtree(folder)
    assert store.get(KEYS[0]) is None
    fill(store, range(3))
    assert_same(DiskStore(folder).get(KEYS[2]), KVS[2])
    assert store.stats().chunks == 3
    assert store.check() == []


def test_a_folder_of_a_newer_release_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("speccache_rag.store.ledger.LEDGER_VERSION", 7)
        DiskStore(tmp_path)
    with pytest.raises(StoreUnavailable, match=r"format version 7; this release knows 1"):
        DiskStore(tmp_path)


def test_quarantine_keeps_the_newest_few(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    fill(store, range(12))
    for key in KEYS:
        with open(store._file(key), "r+b") as file:
            file.truncate(30)
        assert store.get(key) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == disk.QUARANTINED


# Isolation.


def test_folders_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "store")
        fill(store, range(2))
        store.get(KEYS[0])
    finally:
        os.umask(before)
    for path in [store.path, *store.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_each_tenant_has_a_folder_of_its_own(tmp_path: Path) -> None:
    store, kv = DiskStore(tmp_path), KVS[0]
    tenants = [None, "ours", "../../etc", "a/b", "", "\0", "x" * 5000]
    keys = [Namespace("m", "float32", "{}", (), tenant).key(kv.token_ids) for tenant in tenants]
    for key in keys:
        store.put(key, kv)
    folders = sorted(path.name for path in (tmp_path / "kv").iterdir())
    assert folders == sorted({key[:16] for key in keys})
    assert len(folders) == len(tenants)
    inside = {path.name for path in tmp_path.iterdir()}
    assert inside <= {"kv", "tmp", "quarantine", "lock", "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"}


def test_a_writer_without_the_secret_plants_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path).put(KEYS[0], KVS[0])
    store = DiskStore(tmp_path, secret=b"secret")
    assert store.get(KEYS[0]) is None
    assert store.stats().corrupted == 1
    fill(store, [0])
    assert_same(store.get(KEYS[0]), KVS[0])


# Hostile files.


def plant(store: DiskStore, key: ChunkKey, data: bytes, size: int) -> None:
    """A file of `data` and then of nothing, up to `size` bytes, none of which take room."""
    path = store._file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.truncate(path, size)


def header_of(shape: list[int], size: int) -> bytes:
    """A header in all but its checksum; keys and values of `size` bytes each."""
    facts = {"format_version": str(FORMAT_VERSION), "key": KEYS[0], "dtype": "F32", "token_ids": "0,1,2,3,4"}
    header = {
        "__metadata__": {**facts, "position": "7", "checksum": "0" * 64},
        "keys": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
        "values": {"dtype": "F32", "shape": shape, "data_offsets": [size, 2 * size]},
    }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    "kind", ["sparse", "header says huge", "honest but huge", "no header", "header larger than all"]
)
def test_a_huge_file_is_a_miss_without_a_large_allocation(tmp_path: Path, kind: str) -> None:
    store = DiskStore(tmp_path, largest=64 << 20)
    huge = 1 << 38
    good = encode(KEYS[0], KVS[0])
    shape = [3, 5, 2, huge // (3 * 5 * 2 * 8)]
    half = 3 * 5 * 2 * shape[3] * 4
    honest = header_of(shape, half)
    data, size = {
        "sparse": (good, huge),
        "header says huge": (honest, len(good)),
        "honest but huge": (honest, len(honest) + 2 * half),
        "no header": (b"", huge),
        "header larger than all": ((1 << 40).to_bytes(8, "little"), huge),
    }[kind]
    plant(store, KEYS[0], data, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.get(KEYS[0]) is None
    assert store.stats().corrupted == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert not store.contains(KEYS[0])


KILLED = """
import os, sys
from speccache_rag.store import folder
from speccache_rag.store.disk import DiskStore
from tests.contract.store_contract import key_of, make_kv

kv = make_kv(seed=int(sys.argv[2]))
store = DiskStore(sys.argv[1])
real = getattr(folder.os, sys.argv[3])
def die(*arguments):
    if sys.argv[4] == "after":
        real(*arguments)
    os._exit(9)
setattr(folder.os, sys.argv[3], die)
store.put(key_of(kv), kv)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_writer_that_dies_at_any_step_leaves_a_right_ledger(tmp_path: Path, call: str, when: str) -> None:
    store = DiskStore(tmp_path, 3 * SIZE)
    fill(store, range(3))
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "5", call, when], cwd=ROOT)
    assert died.returncode == 9
    fill(store, [6])
    assert store.stats().bytes == on_disk(store) <= 3 * SIZE
    assert store.check() == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_tortured_store_reads_right_and_keeps_its_budget(tmp_path: Path) -> None:
    """The short form of `python -m tests.stress`."""
    command = [sys.executable, "-m", "tests.stress", str(tmp_path), "--kills", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
