from __future__ import annotations

import json
from collections import Counter
from dataclasses import astuple, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan, runs
from tests.unit.reuse_plans import KEYS, plans, ranges

A, B = KEYS[:2]
missed = st.sets(st.sampled_from(KEYS))


def action(plan: ReusePlan, position: int, missed_keys: set[str]) -> str:
    """What is done with one token, told token by token."""
    for chunk in plan.chunks:
        if chunk.start <= position < chunk.end:
            if chunk.state == "missing" or chunk.key in missed_keys:
                return "missed"
            chosen = any(start <= position < end for start, end in plan.recompute)
            # The last token's logits are needed, so it is computed in any case.
            if chunk.state == "computed" or chosen or position == len(plan.token_ids) - 1:
                return "recomputed"
            return "loaded"
    return "fresh"


@settings(deadline=None)
@given(plan=plans(), missed_keys=missed)
def test_actions_are_those_of_each_token_alone(plan: ReusePlan, missed_keys: set[str]) -> None:
    n = len(plan.token_ids)
    assert plan.actions(missed_keys).tolist() == [action(plan, p, missed_keys) for p in range(n)]


@settings(deadline=None)
@given(plan=plans(), missed_keys=missed, data=st.data())
def test_counts_add_up_to_the_prompt(plan: ReusePlan, missed_keys: set[str], data: st.DataObject) -> None:
    n = len(plan.token_ids)
    cached = data.draw(st.integers(0, n))
    counts = plan.counts(cached, missed_keys)
    assert sum(astuple(counts)) == n
    here = Counter(action(plan, p, missed_keys) for p in range(cached, n))
    assert (counts.cached, counts.loaded, counts.recomputed) == (cached, here["loaded"], here["recomputed"])
    assert (counts.missed, counts.fresh) == (here["missed"], here["fresh"])


@settings(deadline=None)
@given(plan=plans(), missed_keys=missed, data=st.data())
def test_a_fill_computes_what_is_not_loaded(plan: ReusePlan, missed_keys: set[str], data: st.DataObject) -> None:
    computed = data.draw(st.integers(0, len(plan.token_ids)))
    found = plan.positions(computed, missed_keys)
    assert found.dtype == np.int64
    wanted = [p for p in range(computed, plan.fill_end) if action(plan, p, missed_keys) != "loaded"]
    assert found.tolist() == wanted


@settings(deadline=None)
@given(plan=plans())
def test_the_region_ends_with_the_last_stored_chunk_and_the_last_token_is_left(plan: ReusePlan) -> None:
    stored = [chunk for chunk in plan.chunks if chunk.state == "stored"]
    assert plan.stored == tuple(stored)
    assert plan.region_end == (stored[-1].end if stored else 0)
    assert plan.fill_end == min(plan.region_end, len(plan.token_ids) - 1)


@settings(deadline=None)
@given(plan=plans())
def test_a_plan_survives_json(plan: ReusePlan) -> None:
    params = json.loads(json.dumps(plan.to_params()))
    assert ReusePlan.from_params(params, list(plan.token_ids)) == replace(plan, kind="")


def test_the_account_of_one_prompt_by_hand() -> None:
    # 0-1 fresh, 2-5 A, 6 fresh, 7-9 B, 10 fresh; 3 and 4 are chosen.
    chunks = (PlannedChunk(A, 2, 4), PlannedChunk(B, 7, 3))
    plan = ReusePlan(tuple(range(11)), chunks, ((3, 5),))
    assert plan.positions(0).tolist() == [0, 1, 3, 4, 6]
    assert astuple(plan.counts()) == (0, 5, 2, 0, 4)
    # A is missed: all of it is computed, and none of it counts as chosen.
    assert plan.positions(0, {A}).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert astuple(plan.counts(0, {A})) == (0, 3, 0, 4, 4)
    # Four tokens were in the prefix cache: what they are is not told.
    assert plan.positions(4).tolist() == [4, 6]
    assert astuple(plan.counts(4)) == (4, 4, 1, 0, 2)


def test_a_prompt_that_ends_inside_a_chunk_recomputes_its_last_token() -> None:
    plan = ReusePlan(tuple(range(10)), (PlannedChunk(A, 2, 4), PlannedChunk(B, 7, 3)))
    assert (plan.region_end, plan.fill_end) == (10, 9)
    assert plan.actions()[-1] == "recomputed"
    assert plan.positions(0).tolist() == [0, 1, 6]
    assert plan.counts(0, {B}).missed == 3


def test_a_plain_prompt_has_nothing_to_fill() -> None:
    plan = ReusePlan((1, 2, 3))
    assert (plan.region_end, plan.fill_end, plan.stored) == (0, 0, ())
    assert plan.positions(0).tolist() == []
    assert astuple(plan.counts(2)) == (2, 0, 0, 0, 1)
    assert plan.salt is None


def test_a_prompt_of_missing_chunks_is_counted_as_missed_and_not_filled() -> None:
    plan = ReusePlan(tuple(range(6)), (PlannedChunk(A, 1, 4, "missing"),), (), None, "k")
    assert (plan.region_end, plan.positions(0).tolist()) == (0, [])
    assert astuple(plan.counts()) == (0, 0, 0, 4, 2)


@settings(deadline=None)
@given(plan=plans(), other=plans(), kind=st.text(max_size=8))
def test_the_salt_is_that_of_the_kind_alone(plan: ReusePlan, other: ReusePlan, kind: str) -> None:
    same = replace(plan, kind=kind).salt == replace(other, kind=kind).salt
    assert same
    assert (replace(plan, kind=kind).salt is None) == (kind == "")
    assert replace(plan, kind=kind).salt != replace(plan, kind=kind + "x").salt


@settings(deadline=None)
@given(st.sets(st.integers(0, 60)))
def test_runs_are_maximal_and_cover_exactly_the_positions(positions: set[int]) -> None:
    found = runs(np.array(sorted(positions), dtype=np.int64))
    assert tuple(found) == ranges(sorted(positions))
    assert json.loads(json.dumps(found)) == [list(run) for run in found]  # plain ints, not numpy's


def test_runs_by_example() -> None:
    assert runs(np.array([2, 3, 7])) == [(2, 4), (7, 8)]
