from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.engines.reuse.fill import FillJob, KVShape, Stretch
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.errors import StoreUnavailable
from speccache_rag.store.base import ChunkStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import ChunkKey, ChunkKV
from tests.unit.reuse_plans import plans

A, B = (ChunkKey(c * 64) for c in "ab")
L, H, D, ANCHOR = 2, 2, 4, 3
SHAPE = KVShape(L, H, D, torch.float32)
# Positions: 2 fresh, chunk A (4), 1 fresh, chunk B (3), 1 fresh.
IDS = tuple(range(100, 111))
PLAN = ReusePlan(IDS, (PlannedChunk(A, 2, 4), PlannedChunk(B, 7, 3)), (), ANCHOR, "kind")


def kv(
    ids: Sequence[int],
    shape: tuple[int, int, int] = (L, H, D),
    dtype: torch.dtype = torch.float32,
    position: int = ANCHOR,
) -> ChunkKV:
    """KV whose every row says which token it is of."""
    layers, heads, head_dim = shape
    rows = torch.tensor(ids, dtype=dtype)[None, :, None, None].expand(layers, len(ids), heads, head_dim).clone()
    return ChunkKV(rows, -rows, tuple(ids), position)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(1 << 20)
    for chunk in PLAN.chunks:
        store.put(ChunkKey(chunk.key), kv(IDS[chunk.start : chunk.end]))
    return store


def stretches_of(job: FillJob, missed_keys: frozenset[str] | None = None) -> list[tuple[int, int, int]]:
    """Run the first three steps. Returns (start, skip, length) of what was written."""
    written: list[Stretch] = []
    lacking = job.load()
    job.decide(lacking if missed_keys is None else missed_keys)
    job.write(written.extend)
    return [(s.start, s.skip, s.length) for s in written]


def test_chunks_are_written_and_fresh_tokens_left_to_compute(store: MemoryStore) -> None:
    job = FillJob(PLAN, store, SHAPE)
    assert job.keys == [A, B]
    assert job.load() == frozenset()
    assert stretches_of(job) == [(2, 0, 4), (7, 0, 3)]
    assert job.positions.tolist() == [0, 1, 6]
    assert job.load_s > 0


def test_chosen_tokens_are_written_and_computed_over(store: MemoryStore) -> None:
    job = FillJob(replace(PLAN, recompute=((3, 5), (9, 10))), store, SHAPE)
    assert stretches_of(job) == [(2, 0, 4), (7, 0, 3)]
    assert job.positions.tolist() == [0, 1, 3, 4, 6, 9]


def test_a_missing_chunk_is_a_hole_and_costs_only_itself(store: MemoryStore) -> None:
    store.delete(A)
    job = FillJob(PLAN, store, SHAPE)
    assert job.load() == {A}
    assert stretches_of(job) == [(7, 0, 3)]
    assert job.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_what_another_rank_lacks_is_a_hole_here_too(store: MemoryStore) -> None:
    job = FillJob(PLAN, store, SHAPE)
    assert stretches_of(job, frozenset({B})) == [(2, 0, 4)]
    assert job.positions.tolist() == [0, 1, 6, 7, 8, 9]


def bad(ids: Sequence[int]) -> dict[str, ChunkKV]:
    """Stored KV that is somebody else's."""
    return {
        "half the layers": kv(ids, (L // 2, H, D)),
        "more layers": kv(ids, (L + 1, H, D)),
        "more heads": kv(ids, (L, 2 * H, D)),
        "one head": kv(ids, (L, 1, D)),
        "another head size": kv(ids, (L, H, 2 * D)),
        "another dtype": kv(ids, dtype=torch.bfloat16),
        "another position": kv(ids, position=ANCHOR + 1),
        "other tokens": kv([1] * len(ids)),
        "too few tokens": kv(ids[:-1]),
    }


@pytest.mark.parametrize("fault", bad(IDS))
def test_stored_kv_that_is_not_the_models_is_a_hole(
    store: MemoryStore, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.delete(A)
    store.put(A, bad(IDS[2:6])[fault])
    job = FillJob(PLAN, store, SHAPE)
    with caplog.at_level(logging.WARNING):
        assert job.load() == {A}
    assert A[:12] in caplog.text
    assert stretches_of(job) == [(7, 0, 3)]
    assert job.kv(A) is None
    assert job.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_without_an_anchor_any_position_will_do(store: MemoryStore) -> None:
    store.delete(A)
    store.put(A, kv(IDS[2:6], position=9))
    assert FillJob(replace(PLAN, anchor_tokens=None), store, SHAPE).load() == frozenset()


def test_a_broken_store_degrades_to_computing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def get(self, key: ChunkKey) -> ChunkKV | None:
            raise StoreUnavailable("the disk is on fire")

    job = FillJob(PLAN, Broken(1 << 20), SHAPE)
    with caplog.at_level(logging.WARNING):
        assert stretches_of(job) == []
    assert job.positions.tolist() == list(range(10))
    assert "on fire" in caplog.text


def test_a_prompt_that_ends_inside_a_chunk_leaves_its_last_token(store: MemoryStore) -> None:
    job = FillJob(replace(PLAN, token_ids=IDS[:10]), store, SHAPE)
    assert stretches_of(job) == [(2, 0, 4), (7, 0, 2)]
    assert job.positions.tolist() == [0, 1, 6]


def test_a_cut_chunk_is_written_up_to_the_cut(store: MemoryStore) -> None:
    cut = replace(PLAN, chunks=(PlannedChunk(A, 2, 2), PlannedChunk(B, 7, 3)))
    job = FillJob(cut, store, SHAPE)
    assert stretches_of(job) == [(2, 0, 2), (7, 0, 3)]
    assert job.positions.tolist() == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("computed", range(11))
def test_what_a_prefix_cache_holds_is_left_alone(store: MemoryStore, computed: int) -> None:
    job = FillJob(replace(PLAN, recompute=((3, 5),)), store, SHAPE, computed)
    assert job.keys == [key for key, end in ((A, 6), (B, 10)) if computed < end]
    written = [start + i for start, skip, length in stretches_of(job) for i in range(skip, length)]
    assert written == [p for p in (2, 3, 4, 5, 7, 8, 9) if p >= computed]
    assert job.positions.tolist() == [p for p in (0, 1, 3, 4, 6) if p >= computed]


def test_only_stored_chunks_are_read(store: MemoryStore) -> None:
    chunks = (replace(PLAN.chunks[0], state="computed"), PLAN.chunks[1])
    job = FillJob(replace(PLAN, chunks=chunks), store, SHAPE)
    assert job.keys == [B]
    assert stretches_of(job) == [(7, 0, 3)]
    assert job.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_same_chunk_twice_is_read_once_and_written_twice(store: MemoryStore) -> None:
    class Counting(MemoryStore):
        reads = 0

        def get(self, key: ChunkKey) -> ChunkKV | None:
            self.reads += 1
            return super().get(key)

    counting = Counting(1 << 20)
    counting.put(A, kv(IDS[2:6]))
    ids = (*IDS[:6], 7, *IDS[2:6], 9)
    job = FillJob(ReusePlan(ids, (PlannedChunk(A, 2, 4), PlannedChunk(A, 7, 4)), (), ANCHOR), counting, SHAPE)
    assert job.keys == [A]
    assert stretches_of(job) == [(2, 0, 4), (7, 0, 4)]
    assert counting.reads == 1


def test_loaded_kv_is_held_until_it_is_written_and_no_longer(store: MemoryStore) -> None:
    job = FillJob(PLAN, store, SHAPE)
    job.load()
    assert job.kv(A) is store.get(A)
    job.decide(())
    store.delete(A)  # evicted between load and write
    written: list[Stretch] = []
    job.write(written.extend)
    assert [s.start for s in written] == [2, 7]
    assert job.kv(A) is None


def test_asking_and_waiting_are_left_to_the_store() -> None:
    asked: list[Any] = []

    class Slow(MemoryStore):
        def request(self, keys: Sequence[ChunkKey]) -> None:
            asked.append(list(keys))

        def ready(self, keys: Sequence[ChunkKey]) -> bool:
            asked.append(list(keys))
            return len(asked) > 2

    job = FillJob(PLAN, Slow(1 << 20), SHAPE)
    job.request()
    assert [job.ready(), job.ready()] == [False, True]
    assert asked == [[A, B]] * 3


@settings(deadline=None)
@given(plan=plans(), data=st.data())
def test_every_position_is_written_or_computed(plan: ReusePlan, data: st.DataObject) -> None:
    """Whatever is missing on whatever rank: what the prefix cache does not hold is written or computed, rightly."""
    plan = _with_tokens_of_its_chunks(plan)
    store: ChunkStore = MemoryStore(1 << 20)
    position = plan.anchor_tokens or 0
    for chunk in plan.chunks:
        if data.draw(st.booleans()):
            store.put(ChunkKey(chunk.key), kv(_tokens_of(chunk.key, 12), position=position))
    computed = data.draw(st.integers(0, len(plan.token_ids)))
    job = FillJob(plan, store, SHAPE, computed)
    elsewhere = data.draw(st.sets(st.sampled_from([c.key for c in plan.chunks]))) if plan.chunks else set()
    missed_keys = job.load() | elsewhere
    job.decide(missed_keys)
    written: list[Stretch] = []
    job.write(written.extend)
    cache: dict[int, int] = {}
    for s in written:
        for i in range(s.skip, s.length):
            cache[s.start + i] = int(s.kv.keys[0, i, 0, 0])
    assert all(token == plan.token_ids[p] for p, token in cache.items())
    positions = job.positions.tolist()
    assert cache.keys() | set(positions) == set(range(computed, plan.fill_end))
    assert not set(positions) & {p for p in cache if plan.actions(missed_keys)[p] == "loaded"}


def _tokens_of(key: str, length: int) -> list[int]:
    return [ord(key[0]) * 100 + i for i in range(length)]


def _with_tokens_of_its_chunks(plan: ReusePlan) -> ReusePlan:
    """One key stands for the same tokens wherever it is."""
    ids = list(plan.token_ids)
    for chunk in plan.chunks:
        ids[chunk.start : chunk.end] = _tokens_of(chunk.key, chunk.length)
    return replace(plan, token_ids=tuple(ids))
