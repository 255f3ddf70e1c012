"""What a token that is recomputed may see, shown on the Transformers engine's model itself, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.transformers.cache import ReuseCache, chunk_kv
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.types import ChunkKV
from tests.kinds import EQUAL, KINDS
from tests.parity.cases import Case, Layout, assert_equals_naive, load_target, poisoned, tokens
from tests.parity.engines import KV_ATOL, assert_kv_equal
from tests.tiny import tiny_model

POISON = 1e30
"""Not NaN where a mask is what hides it: weight zero times NaN is NaN, in every attention kernel."""


@pytest.fixture(scope="module", params=[name for name, kind in KINDS.items() if kind.transformers == EQUAL])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    yield load_target(tiny_model(tmp_path_factory.mktemp(request.param) / "model", request.param))


def test_eager_attention_equals_naive(tiny_folder: Path) -> None:
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "attn_implementation": "eager"}
    with SpecCache(model=str(tiny_folder), engine="transformers", policy="random", engine_options=options) as sc:
        assert_equals_naive(Case(sc, Layout((63, 40), seed=2)), load_target(tiny_folder, "eager"), KV_ATOL)


def test_a_recomputed_token_sees_exactly_the_keys_up_to_itself(target: TargetModel) -> None:
    """Rows 0 .. p - 1 each matter; rows from p on do not: p's own is overwritten, later ones are masked."""
    n, p = 24, 13
    rng = np.random.default_rng(3)
    ids = tokens(rng, n)
    cache, _ = target.prefill(ids)
    stored = chunk_kv(cache, ids)

    def row(kv: ChunkKV) -> torch.Tensor:
        """Fresh keys and values of p in every layer."""
        region = ReuseCache(target.shape, n)
        region.write([Stretch(kv, 0, 0, n)], target.rope)
        target.recompute(ids, np.array([p]), region)
        fresh = chunk_kv(region, ids)
        return torch.stack((fresh.keys[:, p], fresh.values[:, p]))

    clean = row(stored)
    torch.testing.assert_close(clean[0], stored.keys[:, p], atol=KV_ATOL, rtol=0)
    assert torch.equal(row(poisoned(stored, torch.arange(p, n), POISON)), clean)
    assert torch.equal(row(poisoned(stored, torch.tensor([p]), float("nan"))), clean)
    for j in range(p):
        seen = row(poisoned(stored, torch.tensor([j]), 1.0))
        # Layer 0's own row depends on nothing; the attention output first shows in layer 1.
        assert torch.equal(seen[:, 0], clean[:, 0])
        assert not torch.allclose(seen[:, 1], clean[:, 1], atol=1e-4), f"key {j} is not seen"


def test_tokens_recomputed_together_see_each_other_and_nothing_later(tiny_folder: Path) -> None:
    """Stale rows under recomputed tokens are NaN: one that were read would be everywhere."""
    llama = load_target(tiny_folder)
    n, chosen = 40, np.array([0, 1, 7, 19, 20, 21, 39])
    ids = tokens(np.random.default_rng(4), n)
    cache, _ = llama.prefill(ids)
    exact = chunk_kv(cache, ids)
    region = ReuseCache(llama.shape, n)
    region.write([Stretch(poisoned(exact, torch.from_numpy(chosen), float("nan")), 0, 0, n)], llama.rope)
    llama.recompute(ids, chosen, region)
    assert_kv_equal(chunk_kv(region, ids), exact)
