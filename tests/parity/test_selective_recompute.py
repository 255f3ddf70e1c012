"""Selective recompute on the Transformers engine against the slow oracle (naive.py), and what a token may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.engines.base import EngineRequest
from speccache_rag.engines.transformers.cache import ReuseCache, chunk_kv
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.naive import naive_prefill
from speccache_rag.engines.transformers.prefill import Prefilled, prefill
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKey, ChunkKV, Placement, Selection
from tests.parity.engines import KV_ATOL, assert_kv_equal
from tests.tiny import KINDS, VOCAB_SIZE, tiny_model

ANCHOR = tuple(range(5, 16))
LENGTHS = (1, 15, 16, 17, 63, 512, 513)
POISON = 1e30
"""Not NaN where a mask is what hides it: weight zero times NaN is NaN, in every attention kernel."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    yield _load(tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param))


@pytest.fixture(scope="module")
def llama(tiny_folder: Path) -> TargetModel:
    return _load(tiny_folder)


def _load(folder: Path, attn_implementation: str = "sdpa") -> TargetModel:
    return TargetModel.load(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=2048,
        attn_implementation=attn_implementation,
    )


class Case:
    """Two captured chunks of given lengths in a prompt, fresh tokens before, between and behind them."""

    def __init__(self, target: TargetModel, lengths: tuple[int, int], seed: int, ratio: float) -> None:
        rng = np.random.default_rng(seed)
        self.target = target
        self.store = MemoryStore(1 << 30)
        ids = _tokens(rng, 7)
        placements = []
        for index, length in enumerate(lengths):
            tokens = _tokens(rng, length)
            chunk = Chunk(ChunkKey(f"{index:064x}"), "", tokens, np.zeros((length, 2), np.int32))
            cache, _ = target.prefill([*ANCHOR, *tokens])
            self.store.put(chunk.key, chunk_kv(cache, tokens, len(ANCHOR)))
            placements.append(Placement(chunk, len(ids), length))
            ids = (*ids, *tokens, *_tokens(rng, 3))
        n = len(ids)
        self.prompt = AssembledPrompt("", ids, np.zeros((n, 2), np.int32), tuple(placements))
        positions = self.prompt.chunk_positions()
        chosen = positions[rng.random(len(positions)) < ratio]
        self.selection = Selection(chosen, ratio, len(positions))
        self.reused = torch.zeros(n, dtype=torch.bool)
        self.reused[torch.from_numpy(np.setdiff1d(positions, chosen))] = True

    def selective(self) -> Prefilled:
        return prefill(self.target, self.store, EngineRequest(self.prompt, self.selection))

    def stored(self) -> ChunkKV:
        """Chunk rows at their places in the prompt, NaN everywhere else."""
        shape = self.target.shape
        size = (shape.n_layers, self.prompt.n_tokens, shape.n_heads, shape.head_dim)
        keys, values = torch.full(size, float("nan")), torch.full(size, float("nan"))
        for p in self.prompt.placements:
            kv = self.store.get(p.chunk.key)
            assert kv is not None
            keys[:, p.start : p.end] = self.target.rope.move(kv.keys, p.start - kv.position)
            values[:, p.start : p.end] = kv.values
        keys[:, ~self.reused], values[:, ~self.reused] = float("nan"), float("nan")
        return ChunkKV(keys, values, self.prompt.token_ids, 0)


def _tokens(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(rng.integers(3, VOCAB_SIZE - 100, n).tolist())


def _assert_equal_to_naive(case: Case) -> None:
    found = case.selective()
    kv, logits = naive_prefill(case.target, case.prompt.token_ids, case.stored(), case.reused)
    assert not kv.keys.isnan().any(), "the oracle read a row that is not reused"
    assert_kv_equal(chunk_kv(found.cache, case.prompt.token_ids), kv)
    torch.testing.assert_close(found.logits, logits, atol=KV_ATOL, rtol=0)
    assert found.outcome.loaded_tokens == int(case.reused.sum())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6])
def test_selective_equals_naive(llama: TargetModel, length: int, ratio: float) -> None:
    _assert_equal_to_naive(Case(llama, (length, 17), seed=length, ratio=ratio))
    _assert_equal_to_naive(Case(llama, (17, length), seed=length, ratio=ratio))


def test_selective_equals_naive_on_every_kind(target: TargetModel) -> None:
    _assert_equal_to_naive(Case(target, (63, 40), seed=1, ratio=0.3))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 2**32 - 1),
    ratio=st.floats(0.0, 1.0),
)
def test_selective_equals_naive_for_random_selections(
    llama: TargetModel, lengths: tuple[int, int], seed: int, ratio: float
) -> None:
    _assert_equal_to_naive(Case(llama, lengths, seed, ratio))


def test_eager_attention_equals_naive(tiny_folder: Path) -> None:
    _assert_equal_to_naive(Case(_load(tiny_folder, "eager"), (63, 40), seed=2, ratio=0.3))


def test_a_recomputed_token_sees_exactly_the_keys_up_to_itself(target: TargetModel) -> None:
    """Rows 0 .. p - 1 each matter; rows from p on do not: p's own is overwritten, later ones are masked."""
    n, p = 24, 13
    rng = np.random.default_rng(3)
    ids = _tokens(rng, n)
    cache, _ = target.prefill(ids)
    stored = chunk_kv(cache, ids)

    def row(kv: ChunkKV) -> torch.Tensor:
        """Fresh keys and values of p in every layer."""
        region = ReuseCache(target.shape, n)
        region.write(kv, target.rope, 0, 0, n)
        target.recompute(ids, np.array([p]), region)
        fresh = chunk_kv(region, ids)
        return torch.stack((fresh.keys[:, p], fresh.values[:, p]))

    clean = row(stored)
    torch.testing.assert_close(clean[0], stored.keys[:, p], atol=KV_ATOL, rtol=0)
    assert torch.equal(row(_poisoned(stored, range(p, n), POISON)), clean)
    assert torch.equal(row(_poisoned(stored, [p], float("nan"))), clean)
    for j in range(p):
        seen = row(_poisoned(stored, [j], 1.0))
        # Layer 0's own row depends on nothing; the attention output first shows in layer 1.
        assert torch.equal(seen[:, 0], clean[:, 0])
        assert not torch.allclose(seen[:, 1], clean[:, 1], atol=1e-4), f"key {j} is not seen"


def test_tokens_recomputed_together_see_each_other_and_nothing_later(llama: TargetModel) -> None:
    """Stale rows under recomputed tokens are NaN: one that were read would be everywhere."""
    n, chosen = 40, np.array([0, 1, 7, 19, 20, 21, 39])
    ids = _tokens(np.random.default_rng(4), n)
    cache, _ = llama.prefill(ids)
    exact = chunk_kv(cache, ids)
    region = ReuseCache(llama.shape, n)
    region.write(_poisoned(exact, chosen, float("nan")), llama.rope, 0, 0, n)
    llama.recompute(ids, chosen, region)
    assert_kv_equal(chunk_kv(region, ids), exact)


def test_stored_rows_under_recomputed_tokens_are_never_read(llama: TargetModel) -> None:
    case = Case(llama, (63, 40), seed=5, ratio=0.3)
    clean = case.selective()
    for p in case.prompt.placements:
        kv = case.store.get(p.chunk.key)
        assert kv is not None
        stale = case.selection.positions
        stale = stale[(stale >= p.start) & (stale < p.end)] - p.start
        case.store.delete(p.chunk.key)
        case.store.put(p.chunk.key, _poisoned(kv, stale, float("nan")))
    poisoned = case.selective()
    assert torch.equal(poisoned.logits, clean.logits)
    assert_kv_equal(
        chunk_kv(poisoned.cache, case.prompt.token_ids), chunk_kv(clean.cache, case.prompt.token_ids), atol=0.0
    )


def _poisoned(kv: ChunkKV, rows: object, value: float) -> ChunkKV:
    keys, values = kv.keys.clone(), kv.values.clone()
    index = torch.as_tensor(list(rows), dtype=torch.int64)  # type: ignore[call-overload]
    keys[:, index], values[:, index] = value, value
    return replace(kv, keys=keys, values=values)
