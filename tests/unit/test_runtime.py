"""`SpecCache` over fake engines: its calls, prefetching, plans and copies."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from speccache_rag import SpecCache
from speccache_rag import runtime as runtime_module
from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, EngineClosed, PromptError, StoreUnavailable
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.plan import planner as planner_module
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.plan.scoring_models import ScoringModels
from speccache_rag.selection.factory import build_policy
from tests.unit.conftest import Maker, changed

# Life.


def test_two_objects_share_an_engine_until_both_are_closed(maker: Maker, config: SpecCacheConfig) -> None:
    first, second = (SpecCache.from_config(changed(config, policy=p)) for p in ("full_reuse", "random"))
    prompt = [{"role": "user", "content": "Who?"}]
    assert first.generate(prompt).text == second.generate(prompt).text == "an answer"
    first.close()
    first.close()
    assert first.closed and not maker.made[0].closed
    with pytest.raises(EngineClosed):
        first.generate(prompt)
    assert second.generate(prompt).usage.completion_tokens == 2
    second.close()
    assert maker.made[0].closed


def test_closing_ends_the_stream_of_another_thread(maker: Maker, config: SpecCacheConfig) -> None:
    sc = SpecCache.from_config(changed(config, policy="full_reuse")).start()
    maker.made[0].answer_s = 60.0
    deltas = sc.stream("Who?")
    assert next(deltas).text == "an "
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, deltas)
        sc.close()
        with pytest.raises(EngineClosed):
            waiting.result(10.0)


# Life of chunks.


def test_forgotten_texts_are_neither_known_nor_held(maker: Maker, config: SpecCacheConfig) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.warm([A, A + " And more."], show_progress=False)
        assert sc.forget([f" {A}\n", "never seen"]) == 1
        assert sc.stats()["known_chunks"] == 1
        assert len(maker.made[0].held) == 1
        assert sc.forget([A]) == 0


def test_skipped_texts_are_named_by_place_in_the_log_and_by_reason_in_the_report(
    maker: Maker, config: SpecCacheConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        report = sc.warm([A, "", "secret words " * 2000], show_progress=False, skip_bad=True)
    assert [bad.index for bad in report.bad] == [1, 2]
    assert (report.n_texts, report.n_captured, report.n_skipped, report.n_held) == (3, 1, 0, 1)
    assert "at places 1, 2" in caplog.text
    assert "secret" not in caplog.text


def test_a_tenant_forgets_its_own_chunks_only(maker: Maker, config: SpecCacheConfig) -> None:
    ours, theirs = (SpecCache.from_config(changed(config, policy="full_reuse", tenant=t)) for t in ("a", "b"))
    with ours, theirs:
        for sc in (ours, theirs):
            sc.warm([A], show_progress=False)
        assert ours.forget([A]) == 1
        assert (ours.stats()["known_chunks"], theirs.stats()["known_chunks"]) == (0, 1)
        assert len(maker.made[0].held) == 1


# Prefetched chunks.


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


A = "The mill of Arden was built in 1892 by masons from the north, and it burned down twice in forty years."


def test_prefetched_texts_wait_for_the_engine(maker: Maker, config: SpecCacheConfig) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.prefetch([A, "", "   ", A])
        assert maker.made == []
        report = sc.generate(f"{A} Which mill is that?").report
        assert (report.chunks_matched, report.chunks_reused) == (1, 0)
        assert len(maker.made[0].prefetched) == 1


def test_a_text_that_was_prefetched_only_is_captured_after_its_first_prompt(
    maker: Maker, config: SpecCacheConfig
) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse", admission="first")) as sc:
        sc.start().prefetch(iter([A]))
        wait_until(lambda: sc.stats()["known_chunks"] == 1)
        assert maker.made[0].captured == []
        prompt = f"{A} Which mill is that?"
        assert sc.generate(prompt).report.missed_tokens > 0
        wait_until(lambda: sc.stats()["recaptured"] == 1)
        report = sc.generate(prompt).report
        assert (report.chunks_reused, report.missed_tokens) == (1, 0)


@pytest.mark.parametrize("bad", ["word " * 2000, "\ud800" * 40], ids=["too long", "no Unicode"])
def test_what_cannot_be_a_chunk_is_passed_over(maker: Maker, config: SpecCacheConfig, bad: str) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.start().prefetch([bad, A])
        assert sc.generate(f"{A} Which mill is that?").report.chunks_matched == 1
        assert sc.stats()["known_chunks"] == 1


def test_one_text_is_refused_before_its_letters_become_chunks(maker: Maker, config: SpecCacheConfig) -> None:
    with (
        SpecCache.from_config(changed(config, policy="full_reuse")) as sc,
        pytest.raises(PromptError, match="given as one text.*Pass a list"),
    ):
        sc.prefetch(A)


@pytest.mark.parametrize("bad", [None, b"bytes", ["a list"]])
def test_what_is_no_text_is_refused_at_once_and_nothing_waits(maker: Maker, config: SpecCacheConfig, bad: Any) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        with pytest.raises(PromptError, match="which is no text"):
            sc.prefetch([A, bad])
        assert sc.generate(f"{A} Which mill is that?").report.chunks_matched == 0


def test_a_broken_catalogue_costs_the_head_start_and_no_request(
    maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StoreUnavailable("The disk is full.")

    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.prefetch([A])
        monkeypatch.setattr(Catalogue, "add", full)
        assert sc.generate("Who?").text == "an answer"
        assert "not prefetched: The disk is full." in caplog.text


def test_a_prompt_waits_for_a_prefetch_that_is_going_on(
    maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, began, go = ChunkLibrary.learn, threading.Event(), threading.Event()

    def slow(library: ChunkLibrary, chunk: Any) -> None:
        began.set()
        assert go.wait(timeout=30)
        learn(library, chunk)

    monkeypatch.setattr(ChunkLibrary, "learn", slow)
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.start().prefetch([A])  # returns although learning stands still
        assert began.wait(timeout=30)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(sc.generate, f"{A} Which mill is that?")
            go.set()
            assert answer.result().report.chunks_matched == 1


# Planning.


async def plans_of(sc: SpecCache, prompt: Any, **options: Any) -> tuple[PromptPlan, PromptPlan]:
    """The plan, from a thread and from an event loop that is not the engine's."""
    return await asyncio.to_thread(lambda: sc.plan(prompt, **options)), await sc.aplan(prompt, **options)


def test_a_plan_is_the_same_from_a_thread_and_from_an_event_loop(maker: Maker, config: SpecCacheConfig) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.warm([A], show_progress=False)
        one, other = asyncio.run(plans_of(sc, f"{A} Which mill is that?", policy="random", recompute_ratio=0.3))
        assert one.reuse == other.reuse
        assert one.reuse.recompute and one.reuse.kind
        assert maker.made[0].served == [], "nothing is generated"
        assert sc.stats()["requests"] == 0


def test_a_plan_is_served_as_it_is(maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.warm([A], show_progress=False)
        plan = sc.plan(f"{A} Which mill is that?", policy="random", recompute_ratio=0.3)
        monkeypatch.setattr(maker.made[0], "present", None)  # nobody looks again
        report = sc.generate(plan, max_tokens=3).report
        assert maker.made[0].served == [plan.reuse]
        assert (report.policy, report.recompute_ratio, report.chunks_reused) == ("random", 0.3, 1)
        assert (report.score_s, report.align_s) == (0.0, 0.0), "the time of planning is not this call's"
        with pytest.raises(ConfigurationError, match="policy given, and the prompt is planned already"):
            sc.generate(plan, policy="epic")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "best"}, "Unknown policy 'best'"),
        ({"recompute_ratio": 1.5}, "'recompute_ratio' is 1.5"),
        ({"scoring": "never"}, "'scoring' is 'never'"),
        ({"policy": ["epic"]}, "'policy' is"),
        ({"max_tokens": 3}, "A plan has no option 'max_tokens'"),
    ],
)
def test_a_bad_option_of_a_call_is_named(
    maker: Maker, config: SpecCacheConfig, options: dict[str, Any], named: str
) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        with pytest.raises(ConfigurationError, match=named):
            sc.plan("Who?", **options)
        assert sc.generate("Who?").text == "an answer"


def test_a_policy_is_made_once(maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(name: str, *options: Any) -> Any:
        made.append(name)
        return build_policy(name, *options)

    for module in (runtime_module, planner_module):
        monkeypatch.setattr(module, "build_policy", counting)
    with SpecCache.from_config(changed(config, policy="random")) as sc:
        for policy in (None, "random", "epic", "epic"):
            sc.generate("Who?", policy=policy)
        assert made == ["random", "epic"]


def test_the_options_of_a_policy_are_not_anothers(maker: Maker, config: SpecCacheConfig) -> None:
    with SpecCache.from_config(changed(config, policy="random", policy_options={"seed": 7})) as sc:
        kinds = [sc.plan("Who?", policy=policy).reuse.kind for policy in (None, "random", "epic", "random")]
        assert kinds[0] == kinds[1] == kinds[3] != kinds[2]


def test_the_time_to_first_token_begins_at_the_call(
    maker: Maker, config: SpecCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a prompt has to wait for before it is planned is part of it: here, chunks that are being learned."""
    learn = ChunkLibrary.learn

    def slow(library: ChunkLibrary, chunk: Any) -> None:
        time.sleep(0.2)
        learn(library, chunk)

    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        sc.prefetch([A])
        sc.start()
        monkeypatch.setattr(ChunkLibrary, "learn", slow)
        report = sc.generate("Who?").report
        assert report.ttft_s >= report.align_s >= 0.2


def test_what_another_engine_cannot_do_is_said(maker: Maker, config: SpecCacheConfig) -> None:
    with (
        SpecCache.from_config(changed(config, policy="full_reuse")) as sc,
        pytest.raises(ConfigurationError, match="gives no logits"),
    ):
        sc.follow(sc.plan("Who?"))


# The speculative model.


def test_closed_models_start_no_speculative_engine(maker: Maker, config: SpecCacheConfig) -> None:
    host = EngineHost.acquire(config)
    models = ScoringModels(host, changed(config, policy="attended", speculative_model=config.model))
    assert host.engine is maker.made[0]
    models.close()
    with pytest.raises(EngineClosed):
        models.warm([A], lambda: None)
    assert len(maker.made) == 1


# Copies.


def test_copies_share_the_engine_and_pickles_find_it(maker: Maker, config: SpecCacheConfig) -> None:
    with SpecCache.from_config(changed(config, policy="full_reuse")) as sc:
        assert copy.copy(sc) is sc
        assert copy.deepcopy({"llm": sc})["llm"] is sc
        found = pickle.loads(pickle.dumps(sc))
        assert found is SpecCache.shared(sc.config)
        found.start()
        assert len(maker.made) == 1
        found.close()
