from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.sched.output import KVConnectorBlockState

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.engines.vllm.core.scheduler import SchedulerHalf
from speccache_rag.engines.vllm.messages import (
    PARAM,
    Answer,
    CapturePlan,
    Fault,
    Filled,
    StepOrders,
    StepReport,
    reuse_params,
)
from speccache_rag.scoring.questions import KVDeviation

A, B = "aa", "bb"
N = 40
IDS = tuple(range(100, 100 + N))
PLAN = ReusePlan(IDS, (PlannedChunk(A, 4, 10), PlannedChunk(B, 16, 8)), ((5, 7),), 3)
CAPTURE = CapturePlan("cc", 3, 5, "warm")
DONE = Filled(0.1, 0.2, 0.3)
NOTHING: frozenset[str] = frozenset()


def half_of(max_tokens: int = 128, min_fill_tokens: int = 16, world_size: int = 1) -> SchedulerHalf:
    return SchedulerHalf(max_tokens=max_tokens, min_fill_tokens=min_fill_tokens, world_size=world_size, n_layers=4)


def request(params: dict[str, Any] | None, n_tokens: int = N, name: str = "r") -> Any:
    ids = list(range(100, 100 + n_tokens))
    return SimpleNamespace(request_id=name, kv_transfer_params=params, prompt_token_ids=ids, num_prompt_tokens=n_tokens)


def reusing(plan: ReusePlan = PLAN, name: str = "r", question: Any = None) -> Any:
    return request(reuse_params(plan, question), len(plan.token_ids), name)


def step(blocks: dict[str, list[int]] | None = None, *scheduled: str, tokens: int = 0) -> Any:
    """One step's scheduler output: `blocks` are the tables of requests that have any, `scheduled` all that run."""
    state = None
    if blocks is not None:
        state = KVConnectorBlockState(set(blocks), lambda name: (blocks[name],), {})
    return SimpleNamespace(
        kv_connector_block_state=state,
        num_scheduled_tokens=dict.fromkeys({*(blocks or {}), *scheduled}, 1),
        total_num_scheduled_tokens=tokens,
    )


def admit(half: SchedulerHalf, served: Any, computed: int = 0, blocks: tuple[int, ...] = (7, 3)) -> int:
    """What vLLM does when it has room for a request. Returns the promise."""
    promised = half.get_num_new_matched_tokens(served, computed)
    half.update_state_after_alloc(served, blocks, promised)
    return promised


def loaded(half: SchedulerHalf, *names: str, ranks: int = 1, lacking: frozenset[str] = NOTHING) -> None:
    half.update_from_report(StepReport({name: (ranks, lacking) for name in names}))


def ended(half: SchedulerHalf, name: str, result: Any = DONE) -> None:
    half.update_from_report(StepReport(results={name: result}))


def slices(orders: StepOrders) -> list[tuple[str, int, int, bool]]:
    return [(s.request_id, s.start, s.stop, s.last) for s in orders.slices]


# Promises.


@settings(deadline=None)
@given(region_end=st.integers(1, 60), n_tokens=st.integers(1, 60), computed=st.integers(0, 59))
def test_promise_is_the_region_less_what_is_computed(region_end: int, n_tokens: int, computed: int) -> None:
    region_end = min(region_end, n_tokens)
    plan = ReusePlan(tuple(range(n_tokens)), (PlannedChunk(A, 0, region_end),))
    half, served = half_of(), reusing(plan)
    half.on_new_request(served)
    promised = half.get_num_new_matched_tokens(served, computed)
    assert promised == len(range(computed, min(region_end, n_tokens - 1)))
    # At least one prompt token is left for vLLM, which samples from it.
    assert computed >= n_tokens or computed + promised < n_tokens


def test_asking_is_free_of_side_effects() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    assert [half.get_num_new_matched_tokens(served, 0) for _ in range(3)] == [24, 24, 24]
    assert half.build_connector_meta(step({})) == StepOrders()


def test_a_refused_promise_begins_nothing() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    half.update_state_after_alloc(served, [1], 0)
    assert half.build_connector_meta(step({"r": [1]})) == StepOrders()


def test_a_question_is_promised_the_whole_prompt_but_its_last_token() -> None:
    half, served = half_of(), reusing(question=KVDeviation())
    half.on_new_request(served)
    assert admit(half, served) == N - 1
    (start,) = half.build_connector_meta(step({})).starts
    assert (start.computed, start.question) == (0, KVDeviation())


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {PARAM: {}}, reuse_params(ReusePlan(IDS))])
def test_a_request_that_reuses_nothing_is_untouched(params: dict[str, Any] | None) -> None:
    half, plain = half_of(), request(params)
    half.on_new_request(plain)
    assert admit(half, plain) == 0
    assert half.build_connector_meta(step({"r": [1, 2]})) == StepOrders()
    assert half.request_finished(plain) is None


# Fills.


def test_a_start_says_what_the_worker_must_fill_and_is_shipped_once() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    assert admit(half, served, computed=16) == 8
    (start,) = half.build_connector_meta(step({})).starts
    assert (start.request_id, start.computed, start.block_ids, start.question) == ("r", 16, (7, 3), None)
    assert start.plan == PLAN
    assert half.build_connector_meta(step({})) == StepOrders()


def test_nothing_is_dealt_before_the_kv_is_loaded_and_then_all_of_it_once() -> None:
    half, served = half_of(max_tokens=10, min_fill_tokens=4), reusing()
    half.on_new_request(served)
    admit(half, served)
    assert half.build_connector_meta(step({})).slices == []
    loaded(half, "r")
    positions = PLAN.positions(0)
    assert positions.tolist() == [0, 1, 2, 3, 5, 6, 14, 15]
    dealt = [half.build_connector_meta(step({}, tokens=tokens)) for tokens in (8, 0, 0)]
    assert [slices(orders) for orders in dealt] == [[("r", 0, 3, False)], [("r", 3, 8, True)], []]


def test_all_ranks_must_have_loaded_and_what_one_lacks_counts_for_all() -> None:
    half, served = half_of(world_size=3), reusing()
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r", ranks=2, lacking=frozenset({A}))
    assert half.build_connector_meta(step({})).slices == []
    loaded(half, "r", lacking=frozenset({B}))
    (only,) = half.build_connector_meta(step({})).slices
    assert only.missed_keys == {A, B}
    assert (only.start, only.stop, only.last) == (0, 24, True)
    ended(half, "r")
    outcome = half.request_finished(served)
    assert outcome is not None and outcome[PARAM]["missed_keys"] == [A, B]


def test_fills_get_what_a_step_leaves_or_their_floor() -> None:
    plan = ReusePlan(tuple(range(600)), (PlannedChunk(A, 500, 8),))
    half, served = half_of(max_tokens=100, min_fill_tokens=16), reusing(plan)
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r")
    sizes = []
    for tokens in (60, 100, 99, 0, 1000):
        (only,) = half.build_connector_meta(step({}, tokens=tokens)).slices
        sizes.append(only.stop - only.start)
    loading = 1  # of 8 stored tokens, with the first slice
    assert sizes == [40 - loading, 16, 16, 100, 16]


def test_first_come_first_served() -> None:
    half = half_of(max_tokens=12, min_fill_tokens=1)
    for name in ("r1", "r2", "r3"):
        half.on_new_request(served := reusing(name=name))
        admit(half, served)
    loaded(half, "r3", "r2", "r1")
    assert slices(half.build_connector_meta(step({}))) == [("r1", 0, 8, True), ("r2", 0, 2, False)]
    assert slices(half.build_connector_meta(step({}))) == [("r2", 2, 8, True), ("r3", 0, 5, False)]
    assert slices(half.build_connector_meta(step({}))) == [("r3", 5, 8, True)]


def test_the_second_call_after_a_fill_is_no_new_start() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    admit(half, served)
    half.build_connector_meta(step({}))
    loaded(half, "r")
    half.build_connector_meta(step({}))
    ended(half, "r")
    half.update_state_after_alloc(served, [7, 3, 9], 0)  # vLLM schedules it
    assert half.build_connector_meta(step({"r": [7, 3, 9]}, tokens=16)) == StepOrders()


def test_what_became_of_a_fill_goes_out_with_the_request() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    admit(half, served, computed=16)
    loaded(half, "r", lacking=frozenset({B}))
    half.build_connector_meta(step({}))
    ended(half, "r")
    outcome = {"cached_tokens": 16, "missed_keys": [B], "load_s": 0.1, "load_hidden_s": 0.2, "recompute_s": 0.3}
    assert half.request_finished(served) == {PARAM: outcome}
    assert half.request_finished(served) is None


def test_an_answer_goes_out_with_the_request() -> None:
    half, served = half_of(), reusing(question=KVDeviation())
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r")
    assert slices(half.build_connector_meta(step({}))) == [("r", 0, 8, True)]
    answer = np.arange(N, dtype="<f4").tobytes()
    ended(half, "r", Answer(answer))
    assert half.request_finished(served) == {PARAM: {"answer": answer}}


# Preemption.


def test_a_preempted_request_asks_again_and_is_filled_again() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    starts = []
    for computed, blocks in ((0, (1, 2, 3)), (16, (9, 8, 7))):
        admit(half, served, computed, blocks)
        starts += half.build_connector_meta(step({})).starts
        loaded(half, "r")
        (only,) = half.build_connector_meta(step({})).slices
        assert (only.start, only.stop, only.last) == (0, len(PLAN.positions(computed)), True)
        ended(half, "r")
    assert [(s.computed, s.block_ids) for s in starts] == [(0, (1, 2, 3)), (16, (9, 8, 7))]
    assert starts[0].plan is starts[1].plan
    outcome = half.request_finished(served)
    assert outcome is not None
    assert outcome[PARAM]["cached_tokens"] == 0, "what its own first fill left in the prefix cache is no saving"


# Aborts.


@pytest.mark.parametrize("stage", ["queued", "admitted", "started", "loaded", "dealt in part", "dealt", "ended"])
def test_an_abort_at_any_stage_drops_a_running_fill_once_and_leaves_nothing(stage: str) -> None:
    half, served, other = half_of(max_tokens=4, min_fill_tokens=4), reusing(), reusing(name="other")
    half.on_new_request(served)
    stages = ["queued", "admitted", "started", "loaded", "dealt in part", "dealt", "ended"]
    reached = stages.index(stage)
    work = [
        lambda: admit(half, served),
        lambda: half.build_connector_meta(step({})),
        lambda: loaded(half, "r"),
        lambda: half.build_connector_meta(step({})),
        lambda: [half.build_connector_meta(step({})) for _ in range(2)],
        lambda: ended(half, "r"),
    ]
    for act in work[:reached]:
        act()
    half.request_finished(served)
    half.on_new_request(other)
    orders = half.build_connector_meta(step({}))
    running = stage not in ("queued", "ended")
    assert orders.dropped == (["r"] if running else [])
    assert orders.slices == []
    assert orders.finished == ["r"]
    # What was on its way when it was aborted comes to nothing.
    loaded(half, "r")
    ended(half, "r")
    assert half.get_num_new_matched_tokens(served, 0) == 0
    assert half.build_connector_meta(step({})) == StepOrders()
    assert half.request_finished(served) is None
    assert admit(half, other) == 24


# Faults.


def test_a_fault_rewinds_the_request_to_plain_prefill() -> None:
    half, served = half_of(), reusing()
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r")
    half.build_connector_meta(step({}))
    ended(half, "r", Fault("ValueError: it broke"))
    assert half.get_num_new_matched_tokens(served, 0) == 0, "vLLM prefills it from its first token"
    assert half.build_connector_meta(step({})).slices == []
    assert half.request_finished(served) == {PARAM: {"fault": "ValueError: it broke"}}


def test_a_fault_on_one_rank_ends_the_fill_on_the_others() -> None:
    """The others still hold it, and vLLM waits until every rank has reported its end."""
    half, served = half_of(world_size=2), reusing()
    half.on_new_request(served)
    admit(half, served)
    half.build_connector_meta(step({}))
    half.update_from_report(StepReport({"r": (1, NOTHING)}, {"r": Fault("MemoryError: no room")}))
    orders = half.build_connector_meta(step({}))
    assert (orders.dropped, orders.slices) == (["r"], [])
    assert half.build_connector_meta(step({})).dropped == []


def test_a_fault_between_slices_deals_no_more_of_them() -> None:
    half, served = half_of(max_tokens=3, min_fill_tokens=3), reusing()
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r")
    assert len(half.build_connector_meta(step({})).slices) == 1
    ended(half, "r", Fault("it broke"))
    assert half.build_connector_meta(step({})).slices == []


def test_a_fault_of_a_question_is_its_answer() -> None:
    half, served = half_of(), reusing(question=KVDeviation())
    half.on_new_request(served)
    admit(half, served)
    loaded(half, "r")
    half.build_connector_meta(step({}))
    ended(half, "r", Fault("it broke"))
    assert half.request_finished(served) == {PARAM: {"fault": "it broke"}}


# Captures.


def test_captures_are_shipped_each_step_with_the_blocks_of_that_step() -> None:
    half, captured = half_of(), request(CAPTURE.to_params(), name="c")
    half.on_new_request(captured)
    for table in ([4], [4, 9], [4, 9, 2]):
        (job,) = half.build_connector_meta(step({"c": table})).captures
        assert job.block_ids == tuple(table)
        assert (job.request_id, job.plan) == ("c", CAPTURE)
        assert job.token_ids == tuple(captured.prompt_token_ids[3:8])  # the chunk's, without the anchor's


def test_captures_wait_for_the_steps_that_schedule_them() -> None:
    half = half_of()
    half.on_new_request(request(CAPTURE.to_params(), name="c"))
    assert half.build_connector_meta(step({"other": [1]})).captures == []
    assert half.build_connector_meta(step(None, "c")).captures == []  # vLLM gave no tables
    assert half.build_connector_meta(step({"other": [1]}, "c")).captures == []  # or none of this request
    assert len(half.build_connector_meta(step({"c": [1]})).captures) == 1


def test_finished_requests_are_forgotten_and_told_once() -> None:
    half = half_of()
    reused, captured = reusing(), request(CAPTURE.to_params(), name="c")
    for each in (reused, captured):
        half.on_new_request(each)
    half.request_finished(reused)
    half.request_finished(captured)
    orders = half.build_connector_meta(step({"c": [1]}))
    assert orders.captures == []
    assert orders.finished == ["r", "c"]
    assert half.build_connector_meta(step({})).finished == []
