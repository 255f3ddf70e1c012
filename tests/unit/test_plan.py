from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.engines.reuse import plan as neutral
from speccache_rag.engines.reuse.plan import PlannedChunk, runs
from speccache_rag.engines.vllm.plan import PARAM, CapturePlan, ReusePlan

counts = st.integers(0, 1 << 20)
keys = st.text("0123456789abcdef", min_size=1, max_size=8)
plans = st.builds(
    ReusePlan,
    chunks=st.lists(st.tuples(keys, counts, counts), max_size=4).map(tuple),
    recompute=st.lists(st.tuples(counts, counts), max_size=4).map(tuple),
    region_end=counts,
    tag=st.text(max_size=8),
)
captures = st.builds(CapturePlan, key=keys, start=counts, length=counts, tag=st.text(max_size=8), probe=st.booleans())


@settings(deadline=None)
@given(st.sets(st.integers(0, 60)))
def test_runs_are_maximal_and_cover_exactly_the_positions(positions: set[int]) -> None:
    found = runs(np.array(sorted(positions), dtype=np.int64))
    assert [p for start, end in found for p in range(start, end)] == sorted(positions)
    assert all(start < end for start, end in found)
    # Neighbours that touch would be one run.
    assert all(end < start for (_, end), (start, _) in zip(found, found[1:], strict=False))
    assert json.loads(json.dumps(found)) == [list(run) for run in found]  # plain ints, not numpy's


def test_runs_by_example() -> None:
    assert runs(np.array([2, 3, 7])) == [(2, 4), (7, 8)]


@settings(deadline=None)
@given(plans)
def test_a_reuse_plan_survives_json(plan: ReusePlan) -> None:
    params = json.loads(json.dumps(plan.to_params()))
    assert ReusePlan.from_params(params) == plan
    assert CapturePlan.from_params(params) is None


@settings(deadline=None)
@given(captures)
def test_a_capture_plan_survives_json(plan: CapturePlan) -> None:
    params = json.loads(json.dumps(plan.to_params()))
    assert CapturePlan.from_params(params) == plan
    assert ReusePlan.from_params(params) is None


@settings(deadline=None)
@given(plans, captures)
def test_a_request_may_carry_both(reuse: ReusePlan, capture: CapturePlan) -> None:
    both = {PARAM: {**reuse.to_params()[PARAM], **capture.to_params()[PARAM]}}
    assert ReusePlan.from_params(both) == reuse
    assert CapturePlan.from_params(both) == capture


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {PARAM: {}}, {PARAM: None}])
def test_plain_requests_have_no_plan(params: dict[str, object] | None) -> None:
    assert ReusePlan.from_params(params) is None
    assert CapturePlan.from_params(params) is None


@settings(deadline=None)
@given(plans, st.text(max_size=8))
def test_the_tag_is_not_in_the_salt(plan: ReusePlan, tag: str) -> None:
    assert dataclasses.replace(plan, tag=tag).salt() == plan.salt()


@settings(deadline=None)
@given(plans, plans)
def test_other_plans_have_other_salts(a: ReusePlan, b: ReusePlan) -> None:
    same = dataclasses.replace(a, tag="") == dataclasses.replace(b, tag="")
    assert (a.salt() == b.salt()) == same


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": (("a", 0, 4), ("b", 5, 4))},
        {"chunks": (("a", 1, 3), ("b", 4, 4))},
        {"chunks": (("a", 0, 3), ("c", 4, 4))},
        {"chunks": (("a", 0, 3),)},
        {"recompute": ((1, 2),)},
        {"recompute": ((1, 3), (5, 6))},
        {"recompute": ()},
        {"region_end": 9},
    ],
    ids=str,
)
def test_any_change_of_a_plan_changes_its_salt(change: dict[str, object]) -> None:
    plan = ReusePlan((("a", 0, 3), ("b", 4, 4)), ((1, 3),), 8)
    assert dataclasses.replace(plan, **change).salt() != plan.salt()


def test_the_salt_is_the_same_in_every_process() -> None:
    # A constant, so that nothing of it can come from PYTHONHASHSEED.
    assert ReusePlan((("a", 0, 3),), ((1, 2),), 3).salt() == "speccache:5065c1321bbb39d0cfc24a52db9b6f5d"


def test_the_worker_is_told_of_stored_chunks_only() -> None:
    chunks = (PlannedChunk("aa", 2, 4), PlannedChunk("cc", 6, 1, "missing"), PlannedChunk("aa", 7, 3))
    plan = neutral.ReusePlan(tuple(range(12)), chunks, ((3, 5), (8, 9)))
    assert ReusePlan.of(plan, "tag") == ReusePlan((("aa", 2, 4), ("aa", 7, 3)), ((3, 5), (8, 9)), 10, "tag")
