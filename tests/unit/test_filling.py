from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.engines.vllm.core.filling import LOADED_PER_COMPUTED, Filling, deal
from speccache_rag.scoring.questions import KVDeviation, QueryAttention
from tests.unit.reuse_plans import plans

A, B = (letter * 64 for letter in "ab")
NOTHING: frozenset[str] = frozenset()


def plan_of(fresh: int, stored: int, tail: int = 1) -> ReusePlan:
    """So many fresh tokens, then one stored chunk, then the query."""
    return ReusePlan(tuple(range(fresh + stored + tail)), (PlannedChunk(A, fresh, stored),))


def filling(
    plan: ReusePlan, name: str = "r", question: object = None, computed: int = 0, loaded: bool = True
) -> Filling:
    made = Filling(name, plan, computed, question, n_layers=4)  # type: ignore[arg-type]
    if loaded:
        made.loaded(1, NOTHING, 1)
    return made


@settings(deadline=None)
@given(
    several=st.lists(plans(states=("stored",)), min_size=1, max_size=4),
    rooms=st.lists(st.integers(1, 40), min_size=1),
    data=st.data(),
)
def test_slices_are_exactly_the_positions_in_order(
    several: list[ReusePlan], rooms: list[int], data: st.DataObject
) -> None:
    """However much room each step has: every fill's entries are dealt once, in order, and the last one says so."""
    fillings = []
    for index, plan in enumerate(several):
        computed = data.draw(st.integers(0, plan.fill_end))
        lacking = frozenset(data.draw(st.sets(st.sampled_from([A, B, "c" * 64]))))
        made = filling(plan, f"r{index}", computed=computed, loaded=False)
        made.loaded(1, lacking, 1)
        fillings.append((made, plan.positions(computed, lacking), lacking))
    dealt: dict[str, list[tuple[int, int, bool]]] = {f.request_id: [] for f, _, _ in fillings}
    for step in range(10_000):
        slices = deal([f for f, _, _ in fillings], rooms[step % len(rooms)])
        for s in slices:
            dealt[s.request_id].append((s.start, s.stop, s.last))
        assert len({s.request_id for s in slices}) == len(slices), "one slice a fill and step"
        if all(f.dealt for f, _, _ in fillings):
            break
    for made, positions, lacking in fillings:
        slices = dealt[made.request_id]
        assert [i for start, stop, _ in slices for i in range(start, stop)] == list(range(len(positions)))
        assert [last for *_, last in slices] == [False] * (len(slices) - 1) + [True]
        assert made.missed_keys == lacking
        assert made.deal(1000) is None, "the last slice is dealt once"


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5), room=st.integers(1, 80))
def test_a_step_is_not_given_more_than_it_has_room_for(sizes: list[int], room: int) -> None:
    """One fill may pass the room by what loading costs it, and by the one token that keeps it going."""
    fillings = [filling(plan_of(size, 32), f"r{i}") for i, size in enumerate(sizes)]
    slices = deal(fillings, room)
    computed = sum(s.stop - s.start for s in slices)
    loading = len(slices)  # each has 32 stored tokens
    assert computed + loading <= room + 1
    # First come, first served: who got nothing stands behind all who got something.
    assert [s.request_id for s in slices] == [f"r{i}" for i in range(len(slices))]
    assert all(s.last for s in slices[:-1])
    if len(slices) < len(sizes):
        assert computed + loading >= room


def test_loading_costs_room() -> None:
    stored = 10 * LOADED_PER_COMPUTED
    made = filling(plan_of(100, stored))
    first = deal([made], 30)
    assert [(s.start, s.stop, s.last) for s in first] == [(0, 20, False)]
    # Only once: it is written with the first slice.
    assert [(s.start, s.stop) for s in deal([made], 30)] == [(20, 50)]


def test_what_the_prefix_cache_holds_costs_nothing() -> None:
    stored = 10 * LOADED_PER_COMPUTED
    plan = ReusePlan(tuple(range(2 * stored + 50)), (PlannedChunk(A, 0, stored), PlannedChunk(B, stored + 40, stored)))
    made = filling(plan, computed=stored + stored // 2)
    half = stored // 2
    assert made.size == len(plan.positions(stored + half))
    cost = math.ceil((plan.region_end - max(plan.chunks[1].start, stored + half)) / LOADED_PER_COMPUTED)
    dealt = made.deal(1000)
    assert dealt is not None
    assert dealt[1] == cost + made.size


def test_a_fill_moves_on_however_much_it_loads() -> None:
    made = filling(plan_of(3, 1000 * LOADED_PER_COMPUTED))
    slices = [s for _ in range(3) for s in deal([made], 1)]
    assert [(s.start, s.stop, s.last) for s in slices] == [(0, 1, False), (1, 2, False), (2, 3, True)]


def test_a_fill_with_nothing_to_compute_has_one_empty_last_slice() -> None:
    made = filling(plan_of(0, 50))
    (only,) = deal([made], 10)
    assert (only.start, only.stop, only.last) == (0, 0, True)
    assert deal([made], 10) == []


def test_nothing_is_dealt_before_every_rank_has_loaded() -> None:
    made = filling(plan_of(5, 5), loaded=False)
    for rank in range(3):
        assert made.deal(100) is None, f"{rank} of 3 ranks"
        made.loaded(1, frozenset({A}) if rank == 1 else NOTHING, 3)
    (only,) = deal([made], 100)
    assert only.missed_keys == {A}
    assert only.stop == 10, "what one rank lacks is computed on all"


@pytest.mark.parametrize("room", [0, -5])
def test_without_room_nothing_is_dealt(room: int) -> None:
    fills = [filling(plan_of(5, 5)), filling(plan_of(5, 5), "q", KVDeviation())]
    assert deal(fills, room) == []
    assert not any(f.dealt for f in fills)


@pytest.mark.parametrize("question", [KVDeviation(), QueryAttention("target")])
def test_one_question_a_step_is_answered_whole(question: object) -> None:
    fills = [filling(plan_of(50, 50), name, question) for name in ("q1", "q2")]
    fills.append(filling(plan_of(5, 5), "r"))
    first = deal(fills, 300)
    assert [(s.request_id, s.start, s.stop, s.last) for s in first] == [("q1", 0, 50, True), ("r", 0, 5, True)]
    assert [s.request_id for s in deal(fills, 1)] == ["q2"], "it is not cut, however little room there is"
    assert deal(fills, 300) == []


def test_a_question_costs_what_it_computes() -> None:
    plan = plan_of(40, 60, tail=20)
    for layer, cost in ((0, 25), (1, 50), (3, 100)):
        dealt = filling(plan, question=KVDeviation(layer=layer)).deal(1)
        assert dealt is not None and dealt[1] == cost, "layer + 1 of 4 layers, over the region"
    dealt = filling(plan, question=QueryAttention("target")).deal(1)
    assert dealt is not None and dealt[1] == 40 + 20 + math.ceil(60 / LOADED_PER_COMPUTED)
