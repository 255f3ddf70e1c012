from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.vllm.frontend.presence import Presence
from speccache_rag.store.disk import DiskStore
from speccache_rag.types import ChunkKey, ChunkKV

A, B = (ChunkKey(c * 64) for c in "ab")


def kv() -> ChunkKV:
    return ChunkKV(torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2), (1, 2), 0)


def test_without_a_disk_what_was_captured_is_present_until_it_is_missed() -> None:
    presence = Presence(None)
    assert not presence.on_disk
    assert presence.of([A, B]).tolist() == [False, False]
    presence.add(A)
    presence.add(B)
    presence.add(A)
    assert presence.of([A, B]).tolist() == [True, True]
    presence.remove([A, "c" * 64])
    assert presence.of([B, A, B]).tolist() == [True, False, True]
    presence.add(A)
    assert presence.of([A]).tolist() == [True]
    presence.close()


def test_with_a_disk_the_disk_knows(tmp_path: Path) -> None:
    """Also what another process has stored or deleted meanwhile."""
    presence = Presence(DiskStore(tmp_path))
    assert presence.on_disk
    presence.add(A)  # its file is on its way
    assert presence.of([A, B]).tolist() == [False, False]
    with DiskStore(tmp_path) as other:
        other.put(B, kv())
        assert presence.of([A, B]).tolist() == [False, True]
        other.delete(B)
    assert presence.of([A, B]).tolist() == [False, False]
    presence.close()


def test_nothing_asked_is_nothing_answered() -> None:
    found = Presence(None).of([])
    assert (found.shape, found.dtype) == ((0,), bool)


def test_many_threads_may_ask_and_tell() -> None:
    presence = Presence(None)
    keys = [ChunkKey(f"{i:064x}") for i in range(200)]

    def tell(key: ChunkKey) -> None:
        presence.add(key)
        assert presence.of([key]).all()
        presence.remove([key])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(tell, keys))
    assert not presence.of(keys).any()
