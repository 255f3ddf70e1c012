from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.vllm.frontend.worker_ram import WorkerRam
from speccache_rag.store.disk import DiskStore
from tests.contract.store_contract import key_of, make_kv

KVS = [make_kv(seed=seed) for seed in range(3)]
KEYS = [key_of(kv) for kv in KVS]


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    store = DiskStore(tmp_path)
    for key, kv in zip(KEYS, KVS, strict=True):
        store.put(key, kv)
    return store


def test_each_stored_chunk_is_new_once(disk: DiskStore) -> None:
    ram = WorkerRam(disk, 1 << 20)
    assert ram.add(KEYS[:2]) == KEYS[:2]
    assert ram.add(KEYS) == KEYS[2:]
    assert ram.add(KEYS) == []


def test_a_chunk_that_is_stored_later_is_new_then(disk: DiskStore) -> None:
    ram = WorkerRam(disk, 1 << 20)
    disk.delete(KEYS[0])
    assert ram.add(KEYS[:1]) == []
    disk.put(KEYS[0], KVS[0])
    assert ram.add(KEYS[:1]) == KEYS[:1]


def test_what_does_not_fit_any_more_is_new_again(disk: DiskStore) -> None:
    ram = WorkerRam(disk, 2 * disk.nbytes(KEYS[0]))
    for key in KEYS:
        ram.add([key])
    assert ram.add(KEYS[1:]) == []
    assert ram.add(KEYS[:1]) == KEYS[:1]


def test_what_the_worker_was_not_told_is_new_again(disk: DiskStore) -> None:
    ram = WorkerRam(disk, 1 << 20)
    ram.forget(ram.add(KEYS[:1]))
    assert ram.add(KEYS[:1]) == KEYS[:1]
