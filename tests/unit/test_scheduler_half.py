from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import KVConnectorBlockState

from speccache_rag.engines.vllm.core.scheduler import SchedulerHalf
from speccache_rag.engines.vllm.plan import PARAM, CapturePlan, ReusePlan

PLAN = ReusePlan((("aa", 4, 10), ("bb", 16, 8)), ((5, 7),), 24, "tag")
CAPTURE = CapturePlan("cc", 3, 5, "warm")


def request(params: dict[str, Any] | None, n_tokens: int = 40, name: str = "r") -> Any:
    ids = list(range(100, 100 + n_tokens))
    return SimpleNamespace(request_id=name, kv_transfer_params=params, prompt_token_ids=ids, num_prompt_tokens=n_tokens)


def step(blocks: dict[str, list[int]] | None = None, *scheduled: str) -> Any:
    """One step's scheduler output: `blocks` are the tables of requests that have any, `scheduled` all that run."""
    state = None
    if blocks is not None:
        state = KVConnectorBlockState(set(blocks), lambda name: (blocks[name],), {})
    return SimpleNamespace(
        kv_connector_block_state=state, num_scheduled_tokens=dict.fromkeys({*(blocks or {}), *scheduled}, 1)
    )


@settings(deadline=None)
@given(region_end=st.integers(1, 60), n_tokens=st.integers(1, 60), computed=st.integers(0, 59))
def test_promise_is_the_region_less_what_is_computed(region_end: int, n_tokens: int, computed: int) -> None:
    half = SchedulerHalf()
    served = request(ReusePlan((("aa", 0, region_end),), (), region_end).to_params(), n_tokens)
    half.on_new_request(served)
    promised = half.get_num_new_matched_tokens(served, computed)
    assert promised == len(range(computed, min(region_end, n_tokens - 1)))
    # At least one prompt token is left for vLLM, which samples from it.
    assert computed >= n_tokens or computed + promised < n_tokens


def test_asking_is_free_of_side_effects() -> None:
    half, served = SchedulerHalf(), request(PLAN.to_params())
    half.on_new_request(served)
    assert [half.get_num_new_matched_tokens(served, 0) for _ in range(3)] == [24, 24, 24]
    meta = half.build_connector_meta(step({}))
    assert (meta.reuse, meta.capture, meta.finished) == ([], [], [])


def test_the_job_says_what_the_worker_must_fill() -> None:
    half, served = SchedulerHalf(), request(PLAN.to_params())
    half.on_new_request(served)
    computed = 16
    promised = half.get_num_new_matched_tokens(served, computed)
    half.update_state_after_alloc(served, [7, 3], promised)
    (job,) = half.build_connector_meta(step({"r": [7, 3]})).reuse
    assert (job.request_id, job.computed, job.end) == ("r", computed, 24)
    assert job.token_ids == served.prompt_token_ids[:24]
    assert job.block_ids == [7, 3]
    assert job.plan == PLAN
    # Shipped once.
    assert half.build_connector_meta(step({"r": [7, 3]})).reuse == []


def test_a_prompt_that_ends_inside_a_chunk_leaves_its_last_token() -> None:
    half, served = SchedulerHalf(), request(PLAN.to_params(), n_tokens=24)
    half.on_new_request(served)
    assert half.get_num_new_matched_tokens(served, 0) == 23
    half.update_state_after_alloc(served, [1, 2], 23)
    (job,) = half.build_connector_meta(step({"r": [1, 2]})).reuse
    assert (job.computed, job.end, len(job.token_ids)) == (0, 23, 23)


def test_a_refused_promise_makes_no_job() -> None:
    half, served = SchedulerHalf(), request(PLAN.to_params())
    half.on_new_request(served)
    half.update_state_after_alloc(served, [1], 0)
    assert half.build_connector_meta(step({"r": [1]})).reuse == []


def test_a_preempted_request_asks_again_and_gets_the_same_plan() -> None:
    half, served = SchedulerHalf(), request(PLAN.to_params())
    half.on_new_request(served)
    jobs = []
    for computed, blocks in ((0, [1, 2, 3]), (16, [9, 8, 7])):
        promised = half.get_num_new_matched_tokens(served, computed)
        half.update_state_after_alloc(served, blocks, promised)
        jobs += half.build_connector_meta(step({"r": blocks})).reuse
    assert [(job.computed, job.end, job.block_ids) for job in jobs] == [(0, 24, [1, 2, 3]), (16, 24, [9, 8, 7])]
    assert jobs[0].plan is jobs[1].plan


def test_finished_requests_are_forgotten_and_told_once() -> None:
    half = SchedulerHalf()
    reused, captured = request(PLAN.to_params(), name="r"), request(CAPTURE.to_params(), name="c")
    for each in (reused, captured):
        half.on_new_request(each)
    half.request_finished(reused)
    half.request_finished(captured)
    assert half.get_num_new_matched_tokens(reused, 0) == 0
    meta = half.build_connector_meta(step({"c": [1]}))
    assert meta.capture == []
    assert sorted(meta.finished) == ["c", "r"]
    assert half.build_connector_meta(step({})).finished == []


def test_captures_are_shipped_each_step_with_the_blocks_of_that_step() -> None:
    half, captured = SchedulerHalf(), request(CAPTURE.to_params(), name="c")
    half.on_new_request(captured)
    tables = ([4], [4, 9], [4, 9, 2])
    for table in tables:
        (job,) = half.build_connector_meta(step({"c": table})).capture
        assert job.block_ids == table
        assert job.request_id == "c"
        assert job.plan == CAPTURE
        assert job.token_ids == captured.prompt_token_ids[3:8]  # the chunk's, without the anchor's


def test_captures_wait_for_the_steps_that_schedule_them() -> None:
    half = SchedulerHalf()
    half.on_new_request(request(CAPTURE.to_params(), name="c"))
    assert half.build_connector_meta(step({"other": [1]})).capture == []
    assert half.build_connector_meta(step(None, "c")).capture == []  # vLLM gave no tables
    assert half.build_connector_meta(step({"other": [1]}, "c")).capture == []  # or none of this request
    assert len(half.build_connector_meta(step({"c": [1]})).capture) == 1


def test_the_shipped_table_is_a_copy() -> None:
    half = SchedulerHalf()
    half.on_new_request(request(CAPTURE.to_params(), name="c"))
    table = [4]
    (job,) = half.build_connector_meta(step({"c": table})).capture
    table.append(5)  # vLLM goes on appending to its own
    assert job.block_ids == [4]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {PARAM: {}}])
def test_a_request_without_a_plan_is_untouched(params: dict[str, Any] | None) -> None:
    half, plain = SchedulerHalf(), request(params)
    half.on_new_request(plain)
    assert half.get_num_new_matched_tokens(plain, 0) == 0
    half.update_state_after_alloc(plain, [1, 2], 0)
    meta = half.build_connector_meta(step({"r": [1, 2]}))
    assert (meta.reuse, meta.capture) == ([], [])
    half.request_finished(plain)
    assert half.get_num_new_matched_tokens(plain, 0) == 0


def test_many_requests_keep_to_themselves() -> None:
    half = SchedulerHalf()
    served = [request(ReusePlan(((f"k{i}", 0, 8 + i),), (), 8 + i).to_params(), name=f"r{i}") for i in range(5)]
    for each in served:
        half.on_new_request(each)
    for i, each in enumerate(served):
        half.update_state_after_alloc(each, [i], half.get_num_new_matched_tokens(each, 0))
    jobs = half.build_connector_meta(step({each.request_id: [0] for each in served})).reuse
    assert [(job.request_id, job.end, job.block_ids) for job in jobs] == [(f"r{i}", 8 + i, [i]) for i in range(5)]
