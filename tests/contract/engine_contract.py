"""What every engine must keep. Subclass `EngineContract`, give it a running engine, and every law below is tested."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from speccache_rag.engines.base import CaptureRequest, Engine, EngineDelta
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.errors import ConfigurationError, EngineClosed
from speccache_rag.hosting.loop_thread import LoopThread
from speccache_rag.scoring.questions import KVDeviation, QueryAttention, TargetQuestion
from speccache_rag.types import Chunk, ChunkKey

ANCHOR = (5, 6, 7, 8)
GREEDY = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
SOON_S = 1.0
"""Far more than a look into a table takes, far less than waiting for a model would."""


@dataclass(frozen=True)
class Running:
    """An engine and the loop that its coroutines run on."""

    engine: Engine
    loop: LoopThread

    def capture(self, chunk: Chunk) -> Any:
        return self.loop.run(self.engine.capture(CaptureRequest(chunk, ANCHOR)))

    def answer(self, plan: ReusePlan, **sampling: Any) -> list[EngineDelta]:
        return list(self.loop.iterate(lambda: self.engine.generate(plan, {**GREEDY, **sampling})))

    def ask(self, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
        return self.loop.run(self.engine.ask(plan, question))


def make_chunk(seed: int, n_tokens: int = 40) -> Chunk:
    """A chunk of ordinary tokens under a key that nothing else has."""
    ids = tuple(np.random.default_rng(seed).integers(3, 600, n_tokens).tolist())
    return Chunk(ChunkKey(f"{seed:016x}" + "c" * 48), "", ids, np.zeros((n_tokens, 2), np.int32))


def plan_of(*chunks: Chunk, kind: str = "contract") -> ReusePlan:
    """Header, chunks with a token between them, and a question; every third chunk token is recomputed."""
    ids: tuple[int, ...] = (20, 21, 22)
    placed, recompute = [], []
    for chunk in chunks:
        placed.append(PlannedChunk(str(chunk.key), len(ids), chunk.n_tokens))
        recompute += [(i, i + 1) for i in range(len(ids), len(ids) + chunk.n_tokens, 3)]
        ids = (*ids, *chunk.token_ids, 23)
    return ReusePlan((*ids, 24, 25, 26), tuple(placed), tuple(recompute), anchor_tokens=len(ANCHOR), kind=kind)


class EngineContract:
    """The laws. `running` is a fixture of the subclass; its engine knows nothing of the chunks below."""

    def test_its_facts_are_known(self, running: Running) -> None:
        facts = running.engine.facts
        assert facts.fingerprint and facts.dtype
        assert facts.max_model_len > 0

    def test_what_was_captured_is_present_and_nothing_else(self, running: Running) -> None:
        first, second = make_chunk(1), make_chunk(2)
        keys = [first.key, second.key]
        assert running.engine.present(keys).tolist() == [False, False]
        result = running.capture(second)
        assert (result.key, result.n_tokens) == (second.key, second.n_tokens)
        assert result.nbytes > 0
        found = running.engine.present(keys)
        assert (found.dtype, found.tolist()) == (np.dtype(bool), [False, True])
        assert running.engine.present([]).shape == (0,)

    def test_what_is_forgotten_is_not_held(self, running: Running) -> None:
        kept, gone = make_chunk(31), make_chunk(32)
        keys = [kept.key, gone.key, make_chunk(33).key]
        for chunk in (kept, gone):
            running.capture(chunk)
        assert running.loop.run(running.engine.stored(keys)).tolist() == [True, True, False]
        running.loop.run(running.engine.forget([gone.key, make_chunk(33).key]))
        assert running.loop.run(running.engine.stored(keys)).tolist() == [True, False, False]
        assert running.engine.present(keys).tolist() == [True, False, False]

    def test_presence_and_prefetch_are_for_any_thread_and_do_not_wait(self, running: Running) -> None:
        chunk = make_chunk(3)
        running.capture(chunk)
        busy = running.loop.iterate(lambda: running.engine.generate(plan_of(), {**GREEDY, "max_tokens": 64}))
        next(busy)
        started = time.perf_counter()
        running.engine.prefetch([chunk.key, make_chunk(4).key])
        assert running.engine.present([chunk.key]).all()
        assert time.perf_counter() - started < SOON_S
        list(busy)

    def test_the_last_delta_and_no_other_carries_the_outcome(self, running: Running) -> None:
        chunk = make_chunk(5)
        running.capture(chunk)
        plan = plan_of(chunk)
        *before, last = running.answer(plan)
        assert sum(delta.n_new_tokens for delta in (*before, last)) == 2
        assert not any(delta.finished or delta.outcome for delta in before)
        assert last.finished and last.finish_reason
        outcome = last.outcome
        assert outcome is not None
        assert (outcome.missed_keys, outcome.fault) == ((), None)
        assert 0 <= outcome.cached_tokens < len(plan.token_ids)
        assert min(outcome.load_s, outcome.load_hidden_s, outcome.recompute_s) >= 0

    def test_a_chunk_that_is_not_there_is_missed_once_and_the_prompt_is_answered(self, running: Running) -> None:
        here, gone = make_chunk(6), make_chunk(7)
        running.capture(here)
        last = running.answer(plan_of(gone, here, gone))[-1]
        assert last.outcome is not None
        assert last.outcome.missed_keys == (gone.key,)
        assert last.finish_reason == "length" or last.finish_reason == "stop"

    @pytest.mark.parametrize("question", [KVDeviation(), KVDeviation("key", 0), QueryAttention("target")], ids=repr)
    def test_an_answer_has_one_number_a_token_and_is_always_the_same(
        self, running: Running, question: TargetQuestion
    ) -> None:
        chunk = make_chunk(8)
        running.capture(chunk)
        plan = plan_of(chunk)
        first = running.ask(plan, question)
        assert (first.dtype, first.shape) == (np.dtype("float32"), (len(plan.token_ids),))
        (placed,) = plan.chunks
        assert np.isfinite(first[placed.start : placed.end]).all()
        np.testing.assert_allclose(running.ask(plan, question), first, atol=1e-6)

    def test_a_question_about_no_layer_is_refused_and_the_engine_goes_on(self, running: Running) -> None:
        chunk = make_chunk(9)
        running.capture(chunk)
        with pytest.raises(ConfigurationError, match="Layer index 99"):
            running.ask(plan_of(chunk), KVDeviation(layer=99))
        assert running.answer(plan_of(chunk))[-1].finished

    def test_closing_an_answer_frees_the_engine(self, running: Running) -> None:
        answer = running.loop.iterate(lambda: running.engine.generate(plan_of(), {**GREEDY, "max_tokens": 64}))
        next(answer)
        answer.close()
        assert running.answer(plan_of())[-1].finished

    def test_answers_asked_for_together_all_end(self, running: Running) -> None:
        chunk = make_chunk(10)
        running.capture(chunk)

        async def last(plan: ReusePlan) -> EngineDelta:
            return [delta async for delta in running.engine.generate(plan, GREEDY)][-1]

        async def together() -> list[EngineDelta]:
            return await asyncio.gather(*[last(plan) for plan in (plan_of(), plan_of(chunk), plan_of(chunk, chunk))])

        assert all(delta.finished for delta in running.loop.run(together()))


class ClosingContract:
    """The laws of an engine's end. `ending` is a fixture of the subclass: an engine for this test alone."""

    def test_a_closed_engine_says_so_and_closing_again_is_fine(self, ending: Running) -> None:
        async def close() -> None:
            ending.engine.close()
            ending.engine.close()

        assert ending.answer(plan_of())[-1].finished
        ending.loop.run(close())
        with pytest.raises(EngineClosed, match="was closed"):
            ending.answer(plan_of())
        with pytest.raises(EngineClosed, match="was closed"):
            ending.ask(plan_of(), KVDeviation())
