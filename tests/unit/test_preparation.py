from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.errors import ConfigurationError, ContextOverflow, PromptError
from speccache_rag.plan.explanation import explain_request
from speccache_rag.plan.planner import PreparedRequest, prepare
from speccache_rag.plan.scoring_models import ScoringModels
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.questions import QueryAttention
from speccache_rag.selection.factory import build_policy
from speccache_rag.types import AssembledPrompt, ChunkKey
from tests.unit.fake_engine import MAX_MODEL_LEN, FakeEngine, FakeModels, FakeScorer, make_library

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


def prepare_for(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, prompt: Any, **changes: Any
) -> PreparedRequest:
    def present(keys: Sequence[ChunkKey]) -> np.ndarray:
        return np.array([key in engine.held for key in keys], dtype=bool)

    name = changes.pop("policy", "full_reuse")
    options: dict[str, Any] = {
        "present": present,
        "prefetch": engine.prefetched.extend,
        "max_model_len": MAX_MODEL_LEN,
        "policy_name": name,
        "policy": build_policy(name),
        "recompute_ratio": 0.2,
        "scorer": None,
        "scoring": "cached",
        "sampling": {},
    }
    options.update(changes)
    models: Any = FakeModels(options.pop("scorer"))
    return prepare(prompt, tokenizer=tokenizer, library=library, models=models, **options)


# The report adds up.


def expected_parts(prepared: PreparedRequest, engine: FakeEngine) -> list[str]:
    """What should be said of each token, decided token by token."""
    labels = ["fresh"] * prepared.prompt.n_tokens
    selection = prepared.request.selection
    chosen = set(selection.positions.tolist()) if selection is not None else set()
    for placement in prepared.prompt.placements:
        for i in range(placement.start, placement.end):
            if prepared.report.policy == "full_recompute":
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
    prepared = prepare_for(
        tokenizer, library, engine, prompt_of(*texts), policy=policy, recompute_ratio=ratio, scorer=scorer
    )
    report = prepared.finish_report(engine.outcome(prepared.request), ttft_s=0.5)

    labels = expected_parts(prepared, engine)
    assert {part: getattr(report, f"{part}_tokens") for part in PARTS} == {part: labels.count(part) for part in PARTS}
    assert report.prompt_tokens == len(labels) == prepared.prompt.n_tokens
    assert report.matched_tokens == sum(library.chunk(text).n_tokens for text in texts)
    assert report.chunks_matched == len(texts)
    if policy == "full_recompute":
        assert (report.chunks_reused, report.missed_keys) == (0, ())
        return
    by_request = [key_of(library, text) for text in texts if text in gone]
    in_region = cached < prepared.request.prompt.region_end  # else the worker is not asked
    by_worker = [
        p.chunk.key for p in prepared.request.prompt.placements if p.chunk.key in engine.holes and p.end > cached
    ]
    by_worker = by_worker if in_region and prepared.request.selection is not None else []
    assert report.missed_keys == (*by_request, *by_worker)
    assert report.chunks_reused == len(texts) - len(report.missed_keys)


def test_plain_prompts_are_all_fresh(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    prepared = prepare_for(tokenizer, library, engine, prompt_of("nothing that anybody warmed"))
    assert prepared.request.selection is None
    report = prepared.finish_report(engine.outcome(prepared.request), ttft_s=0.1)
    assert report.fresh_tokens == report.prompt_tokens > 0
    assert (report.chunks_matched, report.chunks_reused, report.matched_tokens) == (0, 0, 0)


def test_finishing_twice_changes_nothing(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    engine.held.discard(key_of(library, B))
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A, B, C), policy="random")
    outcome = engine.outcome(prepared.request)
    first = prepared.finish_report(outcome, 0.5).to_dict()
    assert prepared.finish_report(outcome, 0.5).to_dict() == first


def test_seconds_add_up_to_the_ttft(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    scorer: Any = FakeScorer()
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A), policy="speccache", scorer=scorer)
    report = prepared.finish_report(ReuseOutcome(load_s=0.25, recompute_s=0.5), ttft_s=30.0)
    assert (report.ttft_s, report.load_s, report.recompute_s) == (30.0, 0.25, 0.5)
    assert report.score_s > 0 and report.align_s > 0
    parts = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert parts == pytest.approx(30.0)
    # Clocks of two processes may disagree a little; no part is ever negative.
    assert prepared.finish_report(ReuseOutcome(load_s=5.0), ttft_s=1.0).prefill_s == 0.0


# What is selected.


@pytest.mark.parametrize("policy", ["speccache", "random"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_selection_is_over_present_chunks_only(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, ratio: float
) -> None:
    engine.held.discard(key_of(library, A))
    scorer: Any = FakeScorer()
    prepared = prepare_for(
        tokenizer, library, engine, prompt_of(A, B, A, C), policy=policy, recompute_ratio=ratio, scorer=scorer
    )
    assert [p.chunk.text for p in prepared.request.prompt.placements] == [B, C]
    assert [p.chunk.text for p in prepared.prompt.placements] == [A, B, A, C]
    assert [p.chunk.text for p in prepared.missing] == [A, A]
    assert prepared.request.prompt.token_ids == prepared.prompt.token_ids
    selection = prepared.request.selection
    assert selection is not None
    usable = prepared.request.prompt.chunk_positions()
    assert np.isin(selection.positions, usable).all()
    assert selection.n_chunk_tokens == len(usable)
    assert len(selection.positions) >= ratio * len(usable)
    assert prepared.report.effective_ratio == selection.effective_ratio
    assert prepared.report.recompute_ratio == ratio


def test_all_missing_is_plain_prefill(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    engine.held.clear()
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A, B), policy="speccache")  # no scorer, none needed
    assert prepared.request.selection is None
    report = prepared.finish_report(engine.outcome(prepared.request), 0.1)
    assert report.missed_tokens == report.matched_tokens > 0
    assert report.missed_keys == (key_of(library, A), key_of(library, B))


def test_full_recompute_never_reuses_and_misses_nothing(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    for held in (set(engine.held), set[str]()):
        engine.held = held
        prepared = prepare_for(
            tokenizer, library, engine, prompt_of(A, B), policy="full_recompute", recompute_ratio=0.1
        )
        assert prepared.request.selection is None
        assert prepared.missing == ()
        report = prepared.finish_report(engine.outcome(prepared.request), 0.1)
        assert report.recomputed_tokens == report.matched_tokens
        assert (report.policy, report.recompute_ratio, report.effective_ratio) == ("full_recompute", 1.0, 1.0)


def test_presence_is_asked_once_for_all_chunks_in_order(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    asked = []

    def present(keys: Sequence[ChunkKey]) -> np.ndarray:
        asked.append(list(keys))
        return np.ones(len(keys), dtype=bool)

    prepare_for(tokenizer, library, engine, prompt_of(C, A), present=present)
    assert asked == [[key_of(library, C), key_of(library, A)]]
    prepare_for(tokenizer, library, engine, prompt_of("nothing known"), present=present)
    assert len(asked) == 1


def test_sampling_options_pass_through(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A), sampling={"max_tokens": 3})
    assert prepared.request.sampling == {"max_tokens": 3}


# Scores.


def test_cached_scoring_scores_each_chunk_alone_and_once(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer("test_cached_scoring")
    for _ in range(2):
        prepared = prepare_for(
            tokenizer, library, engine, prompt_of(A, B, A), policy="speccache", scorer=scorer, scoring="cached"
        )
        assert prepared.report.scoring == "cached"
    assert scorer.calls == [(A, library.anchor), (B, library.anchor)]
    importance = prepared.probe.scores
    assert importance is not None
    first, _, again = prepared.prompt.placements
    assert np.array_equal(importance[first.start : first.end], importance[again.start : again.end])
    outside = np.setdiff1d(np.arange(prepared.prompt.n_tokens), prepared.prompt.chunk_positions())
    assert np.isnan(importance[outside]).all()


def test_online_scoring_scores_the_prompt_once(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer()
    prepared = prepare_for(
        tokenizer, library, engine, prompt_of(A, B), policy="speccache", scorer=scorer, scoring="online"
    )
    assert scorer.calls == [(prepared.prompt.text, None)]
    assert prepared.report.scoring == "online"
    assert prepared.report.score_s > 0
    # A token is as important as its most important character.
    offsets, importance = prepared.prompt.offsets, prepared.probe.scores
    assert importance is not None
    expected = [max(map(ord, prepared.prompt.text[start:end])) for start, end in offsets.tolist()]
    assert importance.tolist() == expected
    assert len(scorer.calls) == 1


def test_both_scorings_choose_the_most_important_tokens(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    # Scores of single characters do not depend on context, so the two must agree here.
    scorer: Any = FakeScorer()
    chosen = []
    for scoring in ("cached", "online"):
        prepared = prepare_for(
            tokenizer, library, engine, prompt_of(A, B), policy="speccache", scorer=scorer, scoring=scoring
        )
        assert prepared.request.selection is not None
        chosen.append(prepared.request.selection.positions.tolist())
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
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A), scorer=scorer, **options)
    assert scorer.calls == []
    assert (prepared.report.scoring, prepared.report.score_s) == (None, 0.0)
    prepare_for(tokenizer, library, engine, prompt_of(A), scorer=None, **options)  # nor is a scorer needed


def test_scores_without_a_speculative_model_are_a_clear_error() -> None:
    host: Any = SimpleNamespace(scorer=lambda config, layers: None)
    models = ScoringModels(host, SpecCacheConfig(model="m", policy="full_reuse"))
    for question in (
        lambda: models.scorer("last_third"),
        lambda: models.query_attention(prompt_with_nothing(), QueryAttention()),
    ):
        with pytest.raises(ConfigurationError, match="none is configured") as caught:
            question()
        assert "full_reuse" in caught.value.hint


def prompt_with_nothing() -> AssembledPrompt:
    return AssembledPrompt("", (), np.empty((0, 2), dtype=np.int32), ())


def test_a_cut_chunk_takes_the_scores_of_its_tokens(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    scorer: Any = FakeScorer("test_a_cut_chunk")
    prepared = prepare_for(
        tokenizer, library, engine, prompt_of(A[:80]), policy="speccache", scorer=scorer, recompute_ratio=0.5
    )
    (placement,) = prepared.request.prompt.placements
    whole = library.chunk(A)
    assert 0 < placement.length < whole.n_tokens
    scores = library.scores(whole, scorer)
    importance = prepared.probe.scores
    assert importance is not None
    assert np.array_equal(importance[placement.start : placement.end], scores[: placement.length])


# The prompt.


def test_messages_are_rendered_with_the_chat_template(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    messages = prompt_of(A, B)
    by_messages = prepare_for(tokenizer, library, engine, messages)
    by_text = prepare_for(tokenizer, library, engine, tokenizer.render(messages))
    assert by_messages.prompt.text == by_text.prompt.text
    assert by_messages.prompt.token_ids == by_text.prompt.token_ids
    assert by_messages.prompt.text.startswith(library.anchor)


class RecordingTokenizer:
    """Notes whether BOS was asked for."""

    def __init__(self, inner: PromptTokenizer) -> None:
        self._inner = inner
        self.asked: list[bool] = []

    def render(self, messages: Any) -> str:
        return self._inner.render(messages)

    def assemble(self, text: str, matches: Any, *, add_bos: bool) -> Any:
        self.asked.append(add_bos)
        return self._inner.assemble(text, matches, add_bos=add_bos)


def test_bos_goes_before_text_and_never_before_a_rendered_chat(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    recording: Any = RecordingTokenizer(tokenizer)
    prepare_for(recording, library, engine, f"Read this: {A}")
    prepare_for(recording, library, engine, prompt_of(A))
    assert recording.asked == [True, False]


def test_a_prompt_must_leave_room_for_one_new_token(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    n = prepare_for(tokenizer, library, engine, prompt_of(A)).prompt.n_tokens
    assert prepare_for(tokenizer, library, engine, prompt_of(A), max_model_len=n + 1).prompt.n_tokens == n
    with pytest.raises(ContextOverflow) as caught:
        prepare_for(tokenizer, library, engine, prompt_of(A), max_model_len=n)
    assert f"{n} tokens; the model's context is {n}" in str(caught.value)
    assert "max_model_len" in caught.value.hint


def test_an_empty_prompt_is_refused(tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine) -> None:
    with pytest.raises(PromptError, match="The prompt is empty"):
        prepare_for(tokenizer, library, engine, "")


# explain.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gone", [(), (B,), (A, B, C)], ids=["none", "one", "all"])
def test_the_explanation_is_the_report_token_by_token(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, policy: str, gone: tuple[str, ...]
) -> None:
    engine.held -= {key_of(library, text) for text in gone}
    scorer: Any = FakeScorer()
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A, B, C), policy=policy, scorer=scorer)
    explanation = explain_request(prepared)
    actions = [token.action for token in explanation]
    assert actions == expected_parts(prepared, engine)
    report = explanation.report
    assert {part: getattr(report, f"{part}_tokens") for part in PARTS} == {part: actions.count(part) for part in PARTS}
    assert report.to_dict() == prepared.finish_report(engine.outcome(prepared.request), 0.0).to_dict()
    assert "".join(token.text for token in explanation) == prepared.prompt.text
    for token in explanation:
        assert (token.chunk is None) == (token.action == "fresh")
        assert token.token_id == prepared.prompt.token_ids[token.position]
        scored = (
            policy == "speccache" and token.action in ("loaded", "recomputed") and prepared.probe.scores is not None
        )
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

    prepare_for(tokenizer, library, engine, prompt_of(A, B, C), policy="speccache", scorer=Scorer(), scoring="online")
    assert read_before_scoring == [[key_of(library, A), key_of(library, C)]]


def test_nothing_is_read_ahead_for_a_policy_that_reuses_nothing(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    prepare_for(tokenizer, library, engine, prompt_of(A), policy="full_recompute")
    assert engine.prefetched == []


def test_what_reading_ahead_hid_is_reported_beside_the_ttft(
    tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine
) -> None:
    prepared = prepare_for(tokenizer, library, engine, prompt_of(A))
    report = prepared.finish_report(replace(engine.outcome(prepared.request), load_s=0.25, load_hidden_s=0.5), 1.0)
    assert (report.load_s, report.load_hidden_s) == (0.25, 0.5)
    assert report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s == pytest.approx(1.0)
