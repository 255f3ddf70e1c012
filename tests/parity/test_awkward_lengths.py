"""Selective recompute in both engines against the slow oracle (naive.py): any length, any selection, any edge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speccache_rag import SpecCache
from speccache_rag.engines.transformers.model import TargetModel
from tests.hosts import host_of
from tests.parity.cases import Case, Layout, assert_equals_naive
from tests.parity.engines import ENGINES_ATOL, KV_ATOL, assert_kv_equal, first_tokens, poison_cache

LENGTHS = (1, 15, 16, 17, 63, 512, 513)

POISON = 1e4
"""Far from any key or value, and near enough to zero that what does attend to it stays finite. Not NaN: vLLM's kernel
multiplies the rest of a block by weight zero, and plain prefill over a cache of NaN is NaN."""


@pytest.fixture(scope="module")
def oracle(tsc: SpecCache) -> TargetModel:
    """The model of both engines, for naive prefill."""
    target: TargetModel = host_of(tsc).engine._alive()  # type: ignore[attr-defined]
    return target


@contextmanager
def case_of(sc: SpecCache, layout: Layout) -> Iterator[Case]:
    """A case over a cache in which everything is poison that is not written for it."""
    case = Case(sc, layout)
    poison_cache(sc, POISON)
    try:
        yield case
    finally:
        case.forget()
        poison_cache(sc, 0.0)


def atol_of(sc: SpecCache) -> float:
    """The oracle is the Transformers engine's own model."""
    return KV_ATOL if sc.config.engine == "transformers" else ENGINES_ATOL


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6])
def test_selective_equals_naive(engine_sc: SpecCache, oracle: TargetModel, length: int, ratio: float) -> None:
    for lengths in ((length, 17), (17, length)):
        with case_of(engine_sc, Layout(lengths, ratio, seed=length)) as case:
            assert_equals_naive(case, oracle, atol_of(engine_sc))


short = st.sampled_from((0, 1, 15, 16, 17, 63)) | st.integers(1, 70)
some_lengths = st.lists(short, min_size=1, max_size=4).map(tuple).filter(any)
layouts = st.builds(
    Layout,
    lengths=some_lengths,
    ratio=st.sampled_from((0.0, 1.0)) | st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
    head=st.sampled_from((0, 1, 7, 40)),
    gap=st.sampled_from((0, 1, 3)),
    tail=st.sampled_from((0, 1, 3)),
    cut=st.sampled_from((0, 0, 1, 5)),
    edges=st.booleans(),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layout=layouts)
@example(layout=Layout((16, 16), ratio=0.0, head=0, gap=0, tail=0, edges=True))
@example(layout=Layout((17, 0, 15), ratio=0.2, head=0, gap=0, tail=1, cut=5))
@example(layout=Layout((1,), ratio=0.0, head=1, tail=0))
@example(layout=Layout((63, 512), ratio=0.1, tail=0, edges=True))
def test_selective_equals_naive_for_any_layout(engine_sc: SpecCache, oracle: TargetModel, layout: Layout) -> None:
    if layout.head + sum(layout.lengths) + layout.tail < 2:
        return  # the only token is the last one, and nothing is left to reuse
    with case_of(engine_sc, layout) as case:
        assert_equals_naive(case, oracle, atol_of(engine_sc))


@pytest.mark.parametrize("seed", range(3))
def test_stored_rows_under_recomputed_tokens_are_never_read(engine_sc: SpecCache, seed: int) -> None:
    with case_of(engine_sc, Layout((63, 40), seed=seed, edges=True)) as case:
        clean = case.written()
        case.poison(case.chosen, POISON)
        assert_kv_equal(case.written(), clean, atol=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_recomputed_token_sees_nothing_that_stands_behind_it(engine_sc: SpecCache, seed: int) -> None:
    with case_of(engine_sc, Layout((63, 40), seed=seed)) as case:
        clean = case.written()
        first, *_, last = case.chosen.tolist()
        for p in (first, int(np.median(case.chosen)), last):
            case.poison(range(p + 1, len(case.plan.token_ids)), POISON)
            found = case.written()
            assert_kv_equal(first_tokens(found, p + 1), first_tokens(clean, p + 1))
            behind = ~torch.isclose(found.values[:, p + 1 :], clean.values[:, p + 1 :], atol=1.0).all()
            assert behind, "nothing was poisoned"
            case.forget()
            case = Case(engine_sc, Layout((63, 40), seed=seed))
