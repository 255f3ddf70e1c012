"""From a prompt to its plan and its report, on an engine that is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.errors import ConfigurationError, ContextOverflow, EngineError, PromptError
from speccache_rag.plan.draft import Draft
from speccache_rag.plan.explanation import explanation_of
from speccache_rag.plan.planner import Planner
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.plan.report import report_of
from speccache_rag.plan.scoring_models import ScoringModels
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.questions import KVDeviation, QueryAttention
from speccache_rag.selection.factory import build_policy
from speccache_rag.types import ChunkKey, PrefillReport
from tests.unit.fake_engine import FakeEngine, FakeHost, FakeScorer, make_library

A = "The mill of Arden was built in 1892 by masons from the north, and it burned down twice in forty years."
B = "A bridge in Boro carries the road over the river; its third arch is younger than all the others are."
C = "Cale keeps the oldest clock in the valley; it has one hand only, and visitors set their watches by it."
POLICIES = ("speccache", "random", "full_reuse", "full_recompute")
PARTS = ("cached", "loaded", "recomputed", "missed", "fresh")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PromptTokenizer:
    return PromptTokenizer(AutoTokenizer.from_pretrained(tiny_folder))


@pytest.fixture(scope="module")
def library(tokenizer: PromptTokenizer) -> ChunkLibrary:
    """Knows A, B and C."""
    made = make_library(tokenizer)
    for text in (A, B, C):
        made.learn(made.chunk(text))
    return made


@pytest.fixture
def engine(library: ChunkLibrary) -> FakeEngine:
    """Holds A, B and C."""
    made = FakeEngine()
    made.held = {key_of(library, text) for text in (A, B, C)}
    return made


def key_of(library: ChunkLibrary, text: str) -> ChunkKey:
    return library.chunk(text).key


def prompt_of(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "Context:\n" + "\n---\n".join(texts) + "\n\nQuestion: which of them?"}]


def planner_of(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, scorer: Any = None, **options: Any
) -> Planner:
    settings = {"policy": "full_reuse", "recompute_ratio": 0.2, "scoring": "cached", "min_reuse_tokens": 1}
    config = SpecCacheConfig(**{"model": "m", **settings, **options})
    host: Any = FakeHost(tokenizer, library, engine, scorer)
    policy = build_policy(config.policy, config.policy_options)
    return Planner(host, config, policy, ScoringModels(host, config))


def plan_for(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, prompt: Any, **options: Any
) -> PromptPlan:
    planner = planner_of(tokenizer, library, engine, **options)
    begun = planner.begin(prompt, {}, time.perf_counter())
    return asyncio.run(planner.finish(begun)) if isinstance(begun, Draft) else begun


def served(plan: PromptPlan, engine: FakeEngine, ttft_s: float = 0.5, **changes: Any) -> PrefillReport:
    """The report after the engine did what was planned."""
    return report_of(plan, replace(engine.outcome(plan.reuse), **changes), ttft_s)


# The report adds up.


def expected_parts(plan: PromptPlan, engine: FakeEngine) -> list[str]:
    """What should be said of each token, decided token by token."""
    labels = ["fresh"] * plan.prompt.n_tokens
    chosen = {i for start, end in plan.reuse.recompute for i in range(start, end)}
    for placement in plan.prompt.placements:
        for i in range(placement.start, placement.end):
            if plan.policy == "full_recompute":
                labels[i] = "recomputed"
            elif placement.chunk.key not in engine.held or placement.chunk.key in engine.holes:
                labels[i] = "missed"
            else:
                labels[i] = "recomputed" if i in chosen else "loaded"
    cached = min(engine.cached_tokens, len(labels) - 1)
    return ["cached"] * cached + labels[cached:]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(st.sampled_from([A, B, C]), max_size=4),
    gone=st.sets(st.sampled_from([A, B, C])),
    holes=st.sets(st.sampled_from([A, B, C])),
    cached=st.one_of(st.just(0), st.integers(0, 250)),
    policy=st.sampled_from(POLICIES),
    ratio=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
)
def test_every_token_is_counted_once_and_rightly(
    tokenizer: PromptTokenizer,
    library: ChunkLibrary,
    engine: FakeEngine,
    texts: list[str],
    gone: set[str],
    holes: set[str],
    cached: int,
    policy: str,
    ratio: float,
) -> None:
    engine.held = {key_of(library, text) for text in {A, B, C} - gone}
    engine.holes = {key_of(library, text) for text in holes - gone}
    engine.cached_tokens = cached
    scorer: Any = FakeScorer()
    plan = plan_for(tokenizer, library, engine, prompt_of(*texts), policy=policy, recompute_ratio=ratio, scorer=scorer)
    report = served(plan, engine)

    labels = expected_parts(plan, engine)
    assert {part: getattr(report, f"{part}_tokens") for part in PARTS} == {part: labels.count(part) for part in PARTS}
    assert report.prompt_tokens == len(labels) == plan.prompt.n_tokens
    assert report.matched_tokens == sum(library.chunk(text).n_tokens for text in texts)
    assert report.chunks_matched == len(texts)
    if policy == "full_recompute":
        assert (report.chunks_reused, report.missed_keys) == (0, ())
        return
    missing = dict.fromkeys(key_of(library, text) for text in texts if text in gone)
    assert report.missed_keys == (*missing, *engine.outcome(plan.reuse).missed_keys)
    assert report.chunks_reused == sum(key_of(library, text) not in report.missed_keys for text in texts)


def test_plain_prompts_are_all_fresh(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    plan = plan_for(tokenizer, library, engine, prompt_of("nothing that anybody warmed"))
    assert plan.reuse.stored == ()
    report = served(plan, engine)
    assert report.fresh_tokens == report.prompt_tokens > 0
    assert (report.chunks_matched, report.chunks_reused, report.matched_tokens) == (0, 0, 0)


def test_reporting_twice_changes_nothing(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    engine.held.discard(key_of(library, B))
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B, C), policy="random")
    assert served(plan, engine) == served(plan, engine)


def test_after_a_fault_nothing_of_the_plan_was_done(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B), policy="random")
    report = served(plan, engine, fault="It broke.")
    assert (report.fault, report.chunks_reused) == ("It broke.", 0)
    assert report.missed_keys == (), "their stored KV is not to blame"
    assert (report.loaded_tokens, report.recomputed_tokens) == (0, 0)
    assert report.missed_tokens == report.matched_tokens


def test_seconds_add_up_to_the_ttft(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    scorer: Any = FakeScorer()
    plan = plan_for(tokenizer, library, engine, prompt_of(A), policy="speccache", scorer=scorer)
    report = report_of(plan, ReuseOutcome(load_s=0.25, recompute_s=0.5), ttft_s=30.0)
    assert (report.ttft_s, report.load_s, report.recompute_s) == (30.0, 0.25, 0.5)
    assert report.score_s > 0 and report.align_s > 0
    parts = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert parts == pytest.approx(30.0)
    # Clocks of two processes may disagree a little; no part is ever negative.
    assert report_of(plan, ReuseOutcome(load_s=5.0), ttft_s=1.0).prefill_s == 0.0


# What is selected.


@pytest.mark.parametrize("policy", ["speccache", "random"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_selection_is_over_present_chunks_only(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, ratio: float
) -> None:
    engine.held.discard(key_of(library, A))
    scorer: Any = FakeScorer()
    plan = plan_for(
        tokenizer, library, engine, prompt_of(A, B, A, C), policy=policy, recompute_ratio=ratio, scorer=scorer
    )
    states = [(p.chunk.text, c.state) for p, c in zip(plan.prompt.placements, plan.reuse.chunks, strict=True)]
    assert states == [(A, "missing"), (B, "stored"), (A, "missing"), (C, "stored")]
    assert plan.reuse.token_ids == plan.prompt.token_ids
    chosen = positions_of(plan)
    usable = {i for c in plan.reuse.stored for i in range(c.start, c.end)}
    assert set(chosen) <= usable
    assert len(chosen) >= ratio * len(usable)
    assert plan.effective_ratio == len(chosen) / len(usable)
    assert plan.recompute_ratio == ratio


def positions_of(plan: PromptPlan) -> list[int]:
    return [i for start, end in plan.reuse.recompute for i in range(start, end)]


def test_all_missing_is_plain_prefill(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    engine.held.clear()
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B), policy="speccache")  # no scorer, none needed
    assert plan.reuse.stored == ()
    report = served(plan, engine)
    assert report.missed_tokens == report.matched_tokens > 0
    assert report.missed_keys == (key_of(library, A), key_of(library, B))


def test_full_recompute_never_reuses_and_misses_nothing(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    for held in (set(engine.held), set[str]()):
        engine.held = held
        plan = plan_for(tokenizer, library, engine, prompt_of(A, B), policy="full_recompute", recompute_ratio=0.1)
        assert {chunk.state for chunk in plan.reuse.chunks} == {"computed"}
        report = served(plan, engine)
        assert report.recomputed_tokens == report.matched_tokens
        assert (report.policy, report.recompute_ratio, report.effective_ratio) == ("full_recompute", 1.0, 1.0)


def test_presence_is_asked_once_for_all_chunks_in_order(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    asked = []

    class Noting(FakeEngine):
        def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
            asked.append(list(keys))
            return np.ones(len(keys), dtype=bool)

    plan_for(tokenizer, library, Noting(), prompt_of(C, A))
    assert asked == [[key_of(library, C), key_of(library, A)]]
    plan_for(tokenizer, library, Noting(), prompt_of("nothing known"))
    plan_for(tokenizer, library, Noting(), prompt_of(C), policy="full_recompute")
    assert len(asked) == 1


# What is worth loading.


def test_a_short_placement_is_computed_with_the_text_around_it(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    n_tokens = library.chunk(A).n_tokens
    for minimum, state in ((n_tokens, "stored"), (n_tokens + 1, "computed")):
        plan = plan_for(tokenizer, library, engine, prompt_of(A), min_reuse_tokens=minimum)
        assert [chunk.state for chunk in plan.reuse.chunks] == [state]
    assert plan.reasons == (f"it has {n_tokens} tokens; min_reuse_tokens is {n_tokens + 1}",)
    report = served(plan, engine)
    assert report.recomputed_tokens == report.matched_tokens == n_tokens
    assert (report.chunks_reused, report.missed_keys) == (0, ())


def test_a_chunk_where_it_was_captured_is_exact_and_takes_nothing_from_the_budget(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    header = tokenizer.header()
    plan = plan_for(tokenizer, library, engine, f"{header}{A}\n{B}\n{A}", policy="random", recompute_ratio=0.5)
    first, second, third = plan.reuse.chunks
    assert [chunk.exact for chunk in plan.reuse.chunks] == [True, False, False]
    chosen = positions_of(plan)
    assert len(chosen) == int(np.ceil(0.5 * (second.length + third.length)))
    assert min(chosen) >= second.start > first.end
    # Another text in front, of the same length even, or none at all: not what it was captured behind.
    for prompt in (f"{header}. {A}", f"{A}\n{B}"):
        assert not any(chunk.exact for chunk in plan_for(tokenizer, library, engine, prompt).reuse.chunks)


def test_a_chunk_that_was_rounded_when_it_was_stored_is_not_exact(
    tokenizer: PromptTokenizer, engine: FakeEngine
) -> None:
    rounding = make_library(tokenizer, kv_dtype="fp8_e4m3")
    rounding.learn(rounding.chunk(A))
    engine.held = {key_of(rounding, A)}
    (chunk,) = plan_for(tokenizer, rounding, engine, f"{tokenizer.header()}{A}").reuse.chunks
    assert (chunk.state, chunk.exact) == ("stored", False)


def test_a_missing_chunk_is_not_exact(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    engine.held.clear()
    plan = plan_for(tokenizer, library, engine, f"{tokenizer.header()}{A}")
    assert [(chunk.state, chunk.exact) for chunk in plan.reuse.chunks] == [("missing", False)]


# The kind of approximation.


def kind_for(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, prompt: Any = "Who?", **options: Any
) -> str:
    return plan_for(tokenizer, library, engine, prompt, scorer=FakeScorer(), **options).reuse.kind


def test_all_prompts_of_a_configuration_are_of_one_kind_with_chunks_or_without(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    prompts = ("Who?", prompt_of(A), prompt_of(B, A))
    kinds = {kind_for(tokenizer, library, engine, prompt, policy="speccache") for prompt in prompts}
    assert len(kinds) == 1 and "" not in kinds


def test_whatever_makes_another_approximation_makes_another_kind(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    base: dict[str, Any] = {"policy": "speccache", "speculative_model": "small"}
    changes: list[dict[str, Any]] = [
        {},
        {"recompute_ratio": 0.3},
        {"scoring": "online"},
        {"speculative_model": "other"},
        {"policy_options": {"tau_cover": 0.5}},
        {"policy": "random"},
        {"policy": "random", "policy_options": {"seed": 1}},
        {"policy": "full_reuse"},
    ]
    kinds = [kind_for(tokenizer, library, engine, **{**base, **change}) for change in changes]
    other = make_library(tokenizer, anchor="Another anchor.")
    kinds += [kind_for(tokenizer, make_library(tokenizer, tenant="acme"), engine, **base)]
    kinds += [kind_for(tokenizer, other, engine, **base)]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"policy": "speccache"}, {"policy_options": {"tau_cover": 0.7}}),  # its default
        ({"policy": "random"}, {"scoring": "online", "speculative_model": "small"}),
        ({"policy": "full_reuse"}, {"recompute_ratio": 0.9}),
        ({"policy": "cacheblend"}, {"scoring": "online"}),
        ({"policy": "epic"}, {"min_reuse_tokens": 64}),
    ],
    ids=str,
)
def test_what_changes_nothing_leaves_the_kind(
    tokenizer: PromptTokenizer,
    library: ChunkLibrary,
    engine: FakeEngine,
    options: dict[str, Any],
    change: dict[str, Any],
) -> None:
    kinds = [kind_for(tokenizer, library, engine, **each) for each in (options, {**options, **change})]
    assert kinds[0] == kinds[1] != ""


def test_exact_prompts_carry_their_tenant_alone(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    def exact(tenant: str | None, ratio: float = 0.2) -> str:
        options = {"policy": "full_recompute", "tenant": tenant, "recompute_ratio": ratio}
        return kind_for(tokenizer, library, engine, prompt_of(A), **options)

    assert exact(None) == ""
    assert exact("acme") == exact("acme", 0.7) != ""
    assert exact("acme") != exact("other")
    assert exact("acme") != kind_for(tokenizer, make_library(tokenizer, tenant="acme"), engine, tenant="acme")


# Scores.


def test_cached_scoring_scores_each_chunk_alone_and_once(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer("test_cached_scoring")
    for _ in range(2):
        plan = plan_for(
            tokenizer, library, engine, prompt_of(A, B, A), policy="speccache", scorer=scorer, scoring="cached"
        )
        assert plan.scoring == "cached"
    assert scorer.calls == [(A, library.anchor), (B, library.anchor)]
    importance = plan.scores
    assert importance is not None
    first, _, again = plan.prompt.placements
    assert np.array_equal(importance[first.start : first.end], importance[again.start : again.end])
    outside = np.setdiff1d(np.arange(plan.prompt.n_tokens), plan.prompt.chunk_positions())
    assert np.isnan(importance[outside]).all()


def test_online_scoring_scores_the_prompt_once(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer()
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B), policy="speccache", scorer=scorer, scoring="online")
    assert scorer.calls == [(plan.prompt.text, None)]
    assert plan.scoring == "online"
    assert plan.score_s > 0
    # A token is as important as its most important character.
    offsets, importance = plan.prompt.offsets, plan.scores
    assert importance is not None
    expected = [max(map(ord, plan.prompt.text[start:end])) for start, end in offsets.tolist()]
    assert importance.tolist() == expected
    assert len(scorer.calls) == 1


def test_both_scorings_choose_the_most_important_tokens(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    # Scores of single characters do not depend on context, so the two must agree here.
    scorer: Any = FakeScorer()
    chosen = []
    for scoring in ("cached", "online"):
        plan = plan_for(tokenizer, library, engine, prompt_of(A, B), policy="speccache", scorer=scorer, scoring=scoring)
        chosen.append(positions_of(plan))
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) > 0


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("full_reuse", 0.2), ("random", 0.2), ("full_recompute", 0.2), ("speccache", 0.0), ("speccache", 1.0)],
)
def test_nothing_is_scored_that_nobody_asks_for(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, ratio: float
) -> None:
    scorer: Any = FakeScorer()
    options = {"policy": policy, "recompute_ratio": ratio, "scoring": "online"}
    plan = plan_for(tokenizer, library, engine, prompt_of(A), scorer=scorer, **options)
    assert scorer.calls == []
    assert (plan.scoring, plan.score_s) == (None, 0.0)
    plan_for(tokenizer, library, engine, prompt_of(A), scorer=None, **options)  # nor is a scorer needed


@pytest.mark.parametrize("policy", ["speccache", "attended"])
@pytest.mark.parametrize("scoring", ["online", "cached"])
def test_scores_without_a_speculative_model_are_a_clear_error(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, scoring: str
) -> None:
    with pytest.raises(ConfigurationError, match="none is configured") as caught:
        plan_for(tokenizer, library, engine, prompt_of(A), policy=policy, scoring=scoring)
    assert "full_reuse" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "question", "scoring"),
    [
        ({"policy": "cacheblend"}, KVDeviation(), "deviation"),
        ({"policy": "attended", "policy_options": {"scorer": "target"}}, QueryAttention("target"), "attended"),
    ],
    ids=["cacheblend", "attended"],
)
def test_the_target_is_asked_once_and_its_answer_decides(
    tokenizer: PromptTokenizer,
    library: ChunkLibrary,
    engine: FakeEngine,
    options: dict[str, Any],
    question: Any,
    scoring: str,
) -> None:
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B), **options)
    assert engine.asked == [question]
    assert (plan.scoring, plan.scores is None) == (scoring, False)
    positions = plan.prompt.chunk_positions()
    ids = np.array(plan.reuse.token_ids)[positions]
    largest = positions[np.argsort(-ids, kind="stable")[: int(np.ceil(0.2 * len(positions)))]]
    assert positions_of(plan) == sorted(largest.tolist())


def test_an_error_in_a_question_reaches_the_caller_and_the_next_plan_works(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    engine.question_fault = EngineError("The question failed.")
    with pytest.raises(EngineError, match="The question failed"):
        plan_for(tokenizer, library, engine, prompt_of(A), policy="cacheblend")
    engine.question_fault = None
    assert plan_for(tokenizer, library, engine, prompt_of(A), policy="cacheblend").reuse.recompute


def test_an_error_in_a_policy_is_not_swallowed(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("in the policy")

    monkeypatch.setattr(type(build_policy("epic")), "choose", broken)
    with pytest.raises(ZeroDivisionError, match="in the policy"):
        plan_for(tokenizer, library, engine, prompt_of(A), policy="epic")


def test_a_cut_chunk_takes_the_scores_of_its_tokens(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer("test_a_cut_chunk")
    plan = plan_for(
        tokenizer, library, engine, prompt_of(A[:80]), policy="speccache", scorer=scorer, recompute_ratio=0.5
    )
    (placement,) = plan.prompt.placements
    whole = library.chunk(A)
    assert 0 < placement.length < whole.n_tokens
    scores = library.scores(whole, scorer)
    importance = plan.scores
    assert importance is not None
    assert np.array_equal(importance[placement.start : placement.end], scores[: placement.length])


# The prompt.


def test_messages_are_rendered_with_the_chat_template(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    messages = prompt_of(A, B)
    by_messages = plan_for(tokenizer, library, engine, messages)
    by_text = plan_for(tokenizer, library, engine, tokenizer.render(messages).text)
    assert by_messages.prompt.text == by_text.prompt.text
    assert by_messages.prompt.token_ids == by_text.prompt.token_ids
    assert by_messages.prompt.text.startswith(library.anchor)


class RecordingTokenizer:
    """Notes whether BOS was asked for."""

    def __init__(self, inner: PromptTokenizer) -> None:
        self._inner = inner
        self.asked: list[bool] = []

    def render(self, messages: Any) -> Any:
        return self._inner.render(messages)

    def assemble(self, prompt: Any, matches: Any, *, add_bos: bool) -> Any:
        self.asked.append(add_bos)
        return self._inner.assemble(prompt, matches, add_bos=add_bos)


def test_bos_goes_before_text_and_never_before_a_rendered_chat(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    recording: Any = RecordingTokenizer(tokenizer)
    plan_for(recording, library, engine, f"Read this: {A}")
    plan_for(recording, library, engine, prompt_of(A))
    assert recording.asked == [True, False]


def test_a_prompt_must_leave_room_for_one_new_token(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    n = plan_for(tokenizer, library, engine, prompt_of(A)).prompt.n_tokens
    engine.facts = replace(engine.facts, max_model_len=n + 1)
    assert plan_for(tokenizer, library, engine, prompt_of(A)).prompt.n_tokens == n
    engine.facts = replace(engine.facts, max_model_len=n)
    with pytest.raises(ContextOverflow) as caught:
        plan_for(tokenizer, library, engine, prompt_of(A))
    assert f"{n} tokens; the model's context is {n}" in str(caught.value)
    assert "max_model_len" in caught.value.hint


def test_an_empty_prompt_is_refused(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    with pytest.raises(PromptError, match="The prompt is empty"):
        plan_for(tokenizer, library, engine, "")


# explain.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gone", [(), (B,), (A, B, C)], ids=["none", "one", "all"])
def test_the_explanation_is_the_report_token_by_token(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, gone: tuple[str, ...]
) -> None:
    engine.held -= {key_of(library, text) for text in gone}
    scorer: Any = FakeScorer()
    plan = plan_for(tokenizer, library, engine, prompt_of(A, B, C), policy=policy, scorer=scorer)
    explanation = explanation_of(plan)
    actions = [token.action for token in explanation]
    assert actions == expected_parts(plan, engine)
    report = explanation.report
    assert {part: getattr(report, f"{part}_tokens") for part in PARTS} == {part: actions.count(part) for part in PARTS}
    assert report == served(plan, engine, ttft_s=0.0)
    assert "".join(token.text for token in explanation) == plan.prompt.text
    for token in explanation:
        assert (token.chunk is None) == (token.action == "fresh")
        assert token.token_id == plan.prompt.token_ids[token.position]
        scored = policy == "speccache" and token.action in ("loaded", "recomputed") and plan.scores is not None
        assert (token.score is not None) == scored


# Loading runs beside scoring.


def test_stored_chunks_are_read_ahead_before_anything_is_scored(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    engine.held.discard(key_of(library, B))
    read_before_scoring: list[list[ChunkKey]] = []

    class Scorer(FakeScorer):
        def score(self, text: str) -> Any:
            read_before_scoring.append(list(engine.prefetched))
            return super().score(text)

    plan_for(tokenizer, library, engine, prompt_of(A, B, C), policy="speccache", scorer=Scorer(), scoring="online")
    assert read_before_scoring == [[key_of(library, A), key_of(library, C)]]


def test_nothing_is_read_ahead_for_a_policy_that_reuses_nothing(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    plan_for(tokenizer, library, engine, prompt_of(A), policy="full_recompute")
    assert engine.prefetched == []


def test_what_reading_ahead_hid_is_reported_beside_the_ttft(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    plan = plan_for(tokenizer, library, engine, prompt_of(A))
    report = served(plan, engine, ttft_s=1.0, load_s=0.25, load_hidden_s=0.5)
    assert (report.load_s, report.load_hidden_s) == (0.25, 0.5)
    assert report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s == pytest.approx(1.0)
