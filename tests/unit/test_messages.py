from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.vllm.messages import (
    PARAM,
    Answer,
    CapturePlan,
    Fault,
    Filled,
    FillStart,
    StepOrders,
    StepReport,
    reuse_of,
    reuse_params,
)
from speccache_rag.scoring.questions import KVDeviation, QueryAttention
from tests.unit.reuse_plans import plans

counts = st.integers(0, 1 << 20)
captures = st.builds(
    CapturePlan,
    key=st.text("0123456789abcdef", min_size=1, max_size=8),
    start=counts,
    length=counts,
    tag=st.text(max_size=8),
    probe=st.booleans(),
)
layers = st.sampled_from(("all", "last_third", "last"))
questions = (
    st.none()
    | st.builds(KVDeviation, of=st.sampled_from(("value", "key")), layer=st.integers(0, 40))
    | st.builds(QueryAttention, scorer=st.just("target"), layers=layers)
)


@settings(deadline=None)
@given(plan=plans(), question=questions)
def test_a_plan_and_a_question_survive_json(plan: ReusePlan, question: object) -> None:
    params = json.loads(json.dumps(reuse_params(plan, question)))  # type: ignore[arg-type]
    assert reuse_of(params, plan.token_ids) == (replace(plan, kind=""), question)
    assert CapturePlan.from_params(params) is None


@settings(deadline=None)
@given(capture=captures)
def test_a_capture_survives_json(capture: CapturePlan) -> None:
    params = json.loads(json.dumps(capture.to_params()))
    assert CapturePlan.from_params(params) == capture
    assert reuse_of(params, (1, 2)) == (ReusePlan((1, 2)), None)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {PARAM: {}}, {PARAM: None}])
def test_plain_requests_carry_nothing(params: dict[str, object] | None) -> None:
    assert reuse_of(params, [1, 2]) == (ReusePlan((1, 2)), None)
    assert CapturePlan.from_params(params) is None


seconds = st.floats(0, 10)
filled = st.builds(Filled, load_s=seconds, load_hidden_s=seconds, recompute_s=seconds)
names = st.sampled_from(("r", "s", "t"))
reports = st.builds(
    StepReport,
    loaded=st.dictionaries(names, st.tuples(st.integers(1, 3), st.frozensets(st.sampled_from("abc")))),
    results=st.dictionaries(names, filled | st.just(Fault("it broke"))),
)


@settings(deadline=None)
@given(ranks=st.lists(reports, min_size=1, max_size=4), data=st.data())
def test_the_order_of_ranks_does_not_matter(ranks: list[StepReport], data: st.DataObject) -> None:
    whole = reduce(StepReport.aggregate, ranks)
    assert reduce(StepReport.aggregate, data.draw(st.permutations(ranks))) == whole
    for name in "rst":
        said = [report.loaded[name] for report in ranks if name in report.loaded]
        expected = (sum(n for n, _ in said), frozenset().union(*(keys for _, keys in said)))
        assert whole.loaded.get(name, (0, frozenset())) == expected
        ended = [report.results[name] for report in ranks if name in report.results]
        if any(isinstance(result, Fault) for result in ended):
            assert whole.results[name] == Fault("it broke"), "a fault on any rank is the fault of all"
        elif ended:
            result = whole.results[name]
            assert isinstance(result, Filled)
            assert result.load_s == max(r.load_s for r in ended if isinstance(r, Filled)), "the slowest rank's"


def test_aggregating_changes_neither_report() -> None:
    a = StepReport({"r": (1, frozenset("a"))}, {"s": Filled(1, 2, 3)})
    b = StepReport({"r": (1, frozenset("b"))}, {"s": Fault("it broke")})
    copies = pickle.loads(pickle.dumps((a, b)))
    a.aggregate(b)
    assert (a, b) == copies


def test_all_ranks_give_the_same_answer_and_one_of_them_counts() -> None:
    a, b = (StepReport(results={"q": Answer(b"1234")}) for _ in range(2))
    assert a.aggregate(b).results == {"q": Answer(b"1234")}
    broken = StepReport(results={"q": Fault("it broke")})
    assert a.aggregate(broken).results == broken.aggregate(a).results == {"q": Fault("it broke")}


def test_what_crosses_processes_can_be_pickled() -> None:
    start = FillStart("r", ReusePlan((1, 2, 3)), (4, 5), 0, KVDeviation())
    orders = StepOrders(starts=[start], dropped=["s"])
    assert pickle.loads(pickle.dumps(orders)) == orders
