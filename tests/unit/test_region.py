from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from speccache_rag.engines.reuse.fill_job import Region, fill_region
from speccache_rag.errors import StoreUnavailable
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import ChunkKey, ChunkKV

A, B = (ChunkKey(c * 64) for c in "ab")
# Positions: 2 fresh, chunk A (4), 1 fresh, chunk B (3), 1 fresh.
IDS = tuple(range(100, 111))
CHUNKS = ((A, 2, 4), (B, 7, 3))


def kv(ids: tuple[int, ...]) -> ChunkKV:
    zeros = torch.zeros(1, len(ids), 1, 2)
    return ChunkKV(zeros, zeros, ids, 0)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(1 << 20)
    for key, start, length in CHUNKS:
        store.put(key, kv(IDS[start : start + length]))
    return store


class Writes(list[tuple[tuple[int, ...], int, int, int]]):
    def __call__(self, kv: ChunkKV, start: int, skip: int, length: int) -> None:
        self.append((kv.token_ids, start, skip, length))


def fill(store: MemoryStore, **changes: object) -> tuple[Writes, list[int], tuple[str, ...]]:
    writes = Writes()
    region = Region(**{"token_ids": IDS, "chunks": CHUNKS, "recompute": (), "region_end": 10, "end": 10, **changes})
    positions, missed_keys = fill_region(region, store, writes)
    assert positions.dtype == np.int64
    return writes, positions.tolist(), missed_keys


def test_chunks_are_written_and_fresh_tokens_left_to_compute(store: MemoryStore) -> None:
    writes, positions, missed_keys = fill(store)
    assert writes == [(IDS[2:6], 2, 0, 4), (IDS[7:10], 7, 0, 3)]
    assert positions == [0, 1, 6]


def test_chosen_tokens_are_computed_and_counted_as_recomputed(store: MemoryStore) -> None:
    _, positions, missed_keys = fill(store, recompute=((3, 5), (9, 10)))
    assert positions == [0, 1, 3, 4, 6, 9]


def test_a_missing_chunk_is_a_hole_and_costs_only_itself(store: MemoryStore) -> None:
    store.delete(A)
    writes, positions, missed_keys = fill(store, recompute=((3, 5), (8, 9)))
    assert [w[1] for w in writes] == [7]
    assert positions == [0, 1, 2, 3, 4, 5, 6, 8]
    assert missed_keys == (A,)


def test_a_chunk_of_other_tokens_is_a_hole(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.delete(B)
    store.put(B, kv((1, 2, 3)))
    with caplog.at_level(logging.WARNING):
        _, _, missed_keys = fill(store)
    assert missed_keys == (B,)
    assert "other tokens" in caplog.text


def test_a_broken_store_degrades_to_recompute(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def get(self, key: ChunkKey) -> ChunkKV | None:
            raise StoreUnavailable("the disk is on fire")

    with caplog.at_level(logging.WARNING):
        writes, positions, missed_keys = fill(Broken(1 << 20))
    assert writes == []
    assert positions == list(range(10))
    assert missed_keys == (A, B)
    assert "on fire" in caplog.text


def test_a_prompt_that_ends_inside_a_chunk_leaves_its_last_token(store: MemoryStore) -> None:
    writes, positions, missed_keys = fill(store, token_ids=IDS[:10], end=9)
    assert writes[-1] == (IDS[7:10], 7, 0, 2)
    assert positions == [0, 1, 6]


def test_a_cut_chunk_is_written_up_to_the_cut(store: MemoryStore) -> None:
    writes, positions, _ = fill(store, chunks=((A, 2, 2), (B, 7, 3)))
    assert writes[0] == (IDS[2:6], 2, 0, 2)
    assert positions == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("computed", range(11))
def test_what_a_prefix_cache_holds_is_left_alone(store: MemoryStore, computed: int) -> None:
    writes, positions, missed_keys = fill(store, recompute=((3, 5),), computed=computed)
    assert positions == [p for p in (0, 1, 3, 4, 6) if p >= computed]
    written = [start + i for _, start, skip, length in writes for i in range(skip, length)]
    assert written == [p for p in (2, 3, 4, 5, 7, 8, 9) if p >= computed]
