"""What every store tier must keep. A third party subclasses `StoreContract` for its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from speccache_rag.errors import StoreError
from speccache_rag.store.base import ChunkStore, Namespace
from speccache_rag.types import ChunkKey, ChunkKV

NAMESPACE = Namespace("model", "float32", "{}", (1, 2))


def make_kv(n_tokens: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0) -> ChunkKV:
    """Random KV of 3 layers, 2 heads, head dim 4; `seed` gives other tokens and other values."""
    shape = (3, n_tokens, 2, 4)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return ChunkKV(keys, values, tuple(range(seed, seed + n_tokens)), position=7)


def key_of(kv: ChunkKV, namespace: Namespace = NAMESPACE) -> ChunkKey:
    return namespace.key(kv.token_ids)


def assert_same(got: ChunkKV | None, expected: ChunkKV) -> None:
    """Equal bit by bit."""
    assert got is not None
    assert got.keys.dtype == expected.keys.dtype
    assert got.token_ids == expected.token_ids
    assert got.position == expected.position
    for ours, theirs in ((got.keys, expected.keys), (got.values, expected.values)):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def await_ready(store: ChunkStore, keys: Sequence[ChunkKey]) -> None:
    deadline = time.monotonic() + 30
    while not store.ready(keys):
        assert time.monotonic() < deadline, "reads do not end"
        time.sleep(0.001)


def put_soon(store: ChunkStore, kv: ChunkKV) -> Future[int | StoreError]:
    """What became of it, once that is known."""
    told: Future[int | StoreError] = Future()
    assert store.put_soon(key_of(kv), kv, told.set_result)
    return told


class StoreContract:
    """Subclass it, give `store` (a fixture) and `damage`, and every law below is tested."""

    def damage(self, store: ChunkStore, key: ChunkKey) -> None:
        """Change one stored value behind the store's back."""
        raise NotImplementedError

    def test_a_miss_is_none_and_counted(self, store: ChunkStore) -> None:
        assert store.get(key_of(make_kv())) is None
        assert (store.stats().hits, store.stats().misses, store.stats().corrupted) == (0, 1, 0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 513])
    def test_round_trip_is_bitwise(self, store: ChunkStore, dtype: torch.dtype, n_tokens: int) -> None:
        kv = make_kv(n_tokens, dtype)
        limits = torch.finfo(dtype)
        kv.keys[0, 0, 0] = torch.tensor([limits.max, limits.min, -0.0, limits.tiny])
        store.put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)
        assert store.stats().hits == 1

    def test_tensors_need_not_be_contiguous(self, store: ChunkStore) -> None:
        wide = torch.arange(3 * 2 * 5 * 4.0).reshape(3, 2, 5, 4).transpose(1, 2)
        kv = ChunkKV(wide, wide + 1, tuple(range(5)), 0)
        store.put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)

    def test_no_tokens_is_refused(self, store: ChunkStore) -> None:
        kv = make_kv(0)
        with pytest.raises(ValueError, match="without tokens"):
            store.put(key_of(kv), kv)
        assert list(store.keys()) == []

    def test_what_is_stored_is_a_copy(self, store: ChunkStore) -> None:
        kv, original = make_kv(), make_kv()
        store.put(key_of(kv), kv)
        kv.keys.zero_()
        assert_same(store.get(key_of(kv)), original)

    def test_put_is_idempotent(self, store: ChunkStore) -> None:
        kv = make_kv()
        first = store.put(key_of(kv), kv)
        assert first >= kv.nbytes
        other = ChunkKV(kv.keys + 1, kv.values, kv.token_ids, kv.position)
        assert store.put(key_of(kv), other) == first
        assert_same(store.get(key_of(kv)), kv)
        assert (store.stats().chunks, store.stats().bytes) == (1, first)

    def test_put_soon_is_there_at_once_and_tells_its_size(self, store: ChunkStore) -> None:
        kvs = [make_kv(seed=seed) for seed in range(3)]
        told = [put_soon(store, make_kv(seed=seed)) for seed in range(3)]
        for kv in kvs:
            assert store.contains(key_of(kv))
            assert_same(store.get(key_of(kv)), kv)
        assert [each.result(timeout=30) for each in told] == [store.put(key_of(kv), kv) for kv in kvs]
        assert set(store.keys()) == {key_of(kv) for kv in kvs}
        with pytest.raises(ValueError, match="without tokens"):
            put_soon(store, make_kv(0))

    def test_requested_chunks_become_ready(self, store: ChunkStore) -> None:
        kvs = [make_kv(seed=seed) for seed in range(3)]
        for kv in kvs:
            store.put(key_of(kv), kv)
        absent = key_of(make_kv(seed=9))
        keys = [*map(key_of, kvs), absent]
        assert store.ready(keys)
        for _ in range(3):
            store.request(keys)
        await_ready(store, keys)
        for kv in kvs:
            assert_same(store.get(key_of(kv)), kv)
        assert store.get(absent) is None
        assert (store.stats().hits, store.stats().misses) == (3, 1)

    def test_contains_keys_delete(self, store: ChunkStore) -> None:
        kvs = [make_kv(seed=seed) for seed in range(3)]
        for kv in kvs:
            store.put(key_of(kv), kv)
        assert set(store.keys()) == {key_of(kv) for kv in kvs}
        assert store.delete(key_of(kvs[1]))
        assert not store.delete(key_of(kvs[1]))
        assert [store.contains(key_of(kv)) for kv in kvs] == [True, False, True]
        assert store.get(key_of(kvs[1])) is None
        assert store.stats().chunks == 2

    def test_corruption_is_a_counted_miss_and_heals(self, store: ChunkStore) -> None:
        kv, intact = make_kv(), make_kv(seed=1)
        for each in (kv, intact):
            store.put(key_of(each), each)
        self.damage(store, key_of(kv))
        assert store.get(key_of(kv)) is None
        assert (store.stats().misses, store.stats().corrupted) == (1, 1)
        assert not store.contains(key_of(kv))
        store.put(key_of(kv), kv)
        assert_same(store.get(key_of(kv)), kv)
        assert_same(store.get(key_of(intact)), intact)

    def test_check_finds_and_fixes(self, store: ChunkStore) -> None:
        kv, intact = make_kv(), make_kv(seed=1)
        for each in (kv, intact):
            store.put(key_of(each), each)
        assert store.check() == []
        self.damage(store, key_of(kv))
        for fix in (False, True):
            (problem,) = store.check(fix=fix)
            assert key_of(kv) in problem
        assert list(store.keys()) == [key_of(intact)]
        store.check(fix=True)
        assert store.check() == []

    def test_tenants_never_meet(self, store: ChunkStore) -> None:
        kv = make_kv()
        ours, theirs = (Namespace("model", "float32", "{}", (1, 2), tenant) for tenant in ("ours", "theirs"))
        store.put(key_of(kv, ours), kv)
        assert_same(store.get(key_of(kv, ours)), kv)
        assert store.get(key_of(kv, theirs)) is None
        assert store.get(key_of(kv, NAMESPACE)) is None

    def test_many_threads(self, store: ChunkStore) -> None:
        kvs = [make_kv(seed=seed) for seed in range(4)]

        def work(turn: int) -> None:
            kv = kvs[turn % 4]
            store.put(key_of(kv), kv)
            assert_same(store.get(key_of(kv)), kv)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(80)))
        assert (store.stats().chunks, store.stats().hits) == (4, 80)
        assert store.check() == []

    def test_a_context_manager_and_closed_twice(self, store: ChunkStore) -> None:
        with store as entered:
            assert entered is store
        store.close()
