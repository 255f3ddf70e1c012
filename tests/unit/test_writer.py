from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from speccache_rag.errors import StoreError, StoreUnavailable
from speccache_rag.store.writer import BackgroundWriter
from speccache_rag.types import ChunkKey, ChunkKV
from tests.contract.store_contract import key_of, make_kv

Told = Future[int | StoreError]


class Disk:
    """A slow disk: each write waits for `go`."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.written: list[ChunkKey] = []
        self.fault: Exception | None = None

    def write(self, key: ChunkKey, kv: ChunkKV) -> int:
        self.began.set()
        assert self.go.wait(timeout=30)
        if self.fault is not None:
            raise self.fault
        self.written.append(key)
        return kv.nbytes


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.go.set()


KVS = [make_kv(seed=seed) for seed in range(6)]
KEYS = [key_of(kv) for kv in KVS]


def offer(writer: BackgroundWriter, n: int) -> Told | None:
    told: Told = Future()
    return told if writer.offer(KEYS[n], KVS[n], told.set_result) else None


def test_close_writes_what_waits_in_order(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccache_rag.store.writer.WRITERS", 1)
    writer = BackgroundWriter(disk.write, 1 << 20)
    told = [offer(writer, n) for n in range(4)]
    disk.go.set()
    writer.close()
    writer.close()
    assert disk.written == KEYS[:4]
    assert [each.result(timeout=0) for each in told if each] == [kv.nbytes for kv in KVS[:4]]
    assert offer(writer, 4) is None, "closed"


def test_what_exceeds_the_limit_is_refused_and_counted(disk: Disk) -> None:
    writer = BackgroundWriter(disk.write, 3 * KVS[0].nbytes)
    assert all(offer(writer, n) for n in range(3))
    assert offer(writer, 3) is None
    assert offer(writer, 0) is not None, "what waits already takes no more room"
    assert writer.dropped == 1
    disk.go.set()
    writer.close()
    assert sorted(disk.written) == sorted(KEYS[:3])


def test_one_chunk_over_the_limit_is_taken_alone(disk: Disk) -> None:
    writer = BackgroundWriter(disk.write, 1)
    assert offer(writer, 0)
    assert not offer(writer, 1)
    disk.go.set()
    writer.close()


@pytest.mark.parametrize("fault", [StoreUnavailable("the disk is full"), OSError("odd")])
def test_a_fault_is_told_and_the_next_is_written(disk: Disk, fault: Exception) -> None:
    writer = BackgroundWriter(disk.write, 1 << 20)
    disk.go.set()
    disk.fault = fault
    failed = offer(writer, 0)
    assert failed
    result = failed.result(timeout=30)
    assert isinstance(result, StoreUnavailable)
    assert str(fault) in str(result)
    disk.fault = None
    written = offer(writer, 1)
    assert written
    assert written.result(timeout=30) == KVS[1].nbytes
    writer.close()


def test_a_waiting_write_can_be_called_off_and_a_running_one_is_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speccache_rag.store.writer.WRITERS", 1)
    writer = BackgroundWriter(disk.write, 1 << 20)
    told = [offer(writer, n) for n in range(2)]
    assert disk.began.wait(timeout=30)
    assert writer.discard(KEYS[1])
    assert told[1]
    assert isinstance(told[1].result(timeout=0), StoreUnavailable)
    threading.Timer(0.05, disk.go.set).start()
    assert not writer.discard(KEYS[0])
    assert disk.written == [KEYS[0]]
    writer.close()
