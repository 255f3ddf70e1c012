"""Laws of fills on vLLM: cut anywhere, aborted anywhere, beside anything, with anything wrong, they harm nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.errors import EngineError
from speccache_rag.scoring.questions import KVDeviation
from speccache_rag.types import ChunkKey, ChunkKV
from tests.conftest import tiny_engine_options
from tests.parity import fills
from tests.parity.cases import ANCHOR, Case, Layout, tokens
from tests.parity.engines import answer_to, assert_kv_equal, plain, store_of
from tests.parity.fills import (
    assert_a_decode_beside_fills_is_the_decode_alone,
    assert_nothing_is_left,
    assert_same_answers,
    on_its_loop,
    one_by_one,
    side_by_side,
    slices_cut,
    slow_steps,
)
from tests.parity.vllm_kv import engine_of, in_worker

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 32
CACHE_TOKENS = 1280
WIDTH = 16


@pytest.fixture(scope="module")
def narrow(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """An engine whose steps are small, so that a fill takes dozens of them, and whose KV cache holds 1,248 tokens."""
    options = tiny_engine_options(
        max_num_batched_tokens=WIDTH,
        max_num_seqs=6,
        min_fill_tokens=4,
        kv_cache_memory_bytes=CACHE_TOKENS * 2048,
        block_size=BLOCK_SIZE,
    )
    store = tmp_path_factory.mktemp("store")
    with SpecCache(model=str(tiny_folder), policy="full_reuse", store=str(store), engine_options=options) as running:
        yield running.start()


def case(sc: SpecCache, seed: int, lengths: tuple[int, ...] = (63, 40, 90), ratio: float = 0.3) -> ReusePlan:
    """A plan over chunks that the engine has captured; `anchor_tokens` says behind what."""
    return replace(Case(sc, Layout(lengths, ratio, seed)).plan, anchor_tokens=len(ANCHOR))


# Slices.


@pytest.mark.parametrize("width", [1, 7, 64])
def test_slices_of_any_width_write_the_kv_of_the_whole(sc: SpecCache, width: int) -> None:
    made = Case(sc, Layout((63, 40, 90), 0.5, seed=width))
    whole = made.written()
    with slices_cut(sc, width):
        assert_kv_equal(made.written(), whole)
    made.forget()


def test_slices_dealt_over_many_steps_write_the_kv_of_the_whole(sc: SpecCache, narrow: SpecCache) -> None:
    whole, cut = (Case(each, Layout((63, 40, 90), 0.5, seed=5)) for each in (sc, narrow))
    with slow_steps(narrow, 0.0):
        assert_kv_equal(cut.written(), whole.written())
        widths = [stop - start for _, start, stop in in_worker(narrow, fills.slices_of_steps)]
    assert len(widths) > 5 and max(widths) <= WIDTH
    assert sum(widths) == len(cut.plan.positions(0))


# Beside others.


def test_a_decode_beside_fills_is_the_decode_alone(sc: SpecCache) -> None:
    rng = np.random.default_rng(1)
    assert_a_decode_beside_fills_is_the_decode_alone(
        sc, ReusePlan(tokens(rng, 40)), [case(sc, seed) for seed in (11, 12, 13)]
    )


def test_a_decode_beside_many_small_slices_is_the_decode_alone(narrow: SpecCache) -> None:
    rng = np.random.default_rng(2)
    assert_a_decode_beside_fills_is_the_decode_alone(
        narrow, ReusePlan(tokens(rng, 40)), [case(narrow, seed, (40, 30)) for seed in (14, 15)]
    )


def test_fills_and_prefills_side_by_side_equal_each_alone(narrow: SpecCache) -> None:
    plans = [case(narrow, seed, lengths, ratio) for seed, (lengths, ratio) in enumerate(_MIXED)]
    plans += [plain(plans[0]), plain(plans[1])]
    alone = one_by_one(narrow, plans)
    with slow_steps(narrow, 0.0):
        assert_same_answers(side_by_side(narrow, plans), alone)
        owners = [name for name, _, _ in in_worker(narrow, fills.slices_of_steps)]
    assert owners != sorted(owners) or len(set(owners)) == len(_MIXED)
    assert_nothing_is_left(narrow)


_MIXED = [((63, 40), 0.0), ((17, 90), 0.4), ((40,), 1.0), ((15, 16, 1), 0.2)]


def test_two_fills_larger_than_the_cache_wait_for_each_other(narrow: SpecCache) -> None:
    plans = [case(narrow, seed, (400, 300)) for seed in (21, 22)]
    assert sum(len(plan.token_ids) for plan in plans) > CACHE_TOKENS
    alone = one_by_one(narrow, plans)
    assert_same_answers(side_by_side(narrow, plans), alone)
    assert_nothing_is_left(narrow)


def test_a_request_that_is_preempted_while_it_decodes_answers_as_alone(narrow: SpecCache) -> None:
    plans = [case(narrow, seed, (150, 130)) for seed in (31, 32, 33)]
    n_tokens = 200
    assert sum(len(plan.token_ids) for plan in plans) < CACHE_TOKENS < sum(len(p.token_ids) + n_tokens for p in plans)
    alone = one_by_one(narrow, plans, n_tokens)
    with slow_steps(narrow, 0.0):
        assert_same_answers(side_by_side(narrow, plans, n_tokens), alone)
        begun = Counter(in_worker(narrow, fills.starts_of_steps))
    assert len(begun) == 3
    assert max(begun.values()) > 1, "no request was filled again: the test shows nothing"
    assert_nothing_is_left(narrow)


# Aborts.


def test_a_fill_aborted_at_any_slice_leaves_no_trace(narrow: SpecCache) -> None:
    plan = case(narrow, 41, (200, 150), 0.8)
    other = case(narrow, 42)
    alone = one_by_one(narrow, [plan, other])
    reached = set()
    for at_slice in (0, 1, 3, 6, 9):
        with slow_steps(narrow, 0.02):
            on_its_loop(narrow, _aborted(narrow, plan, at_slice))
            # Beside whatever of it is still going on, another request takes the blocks that it gives back.
            assert_same_answers(one_by_one(narrow, [other]), alone[1:])
            slices, starts = (in_worker(narrow, of) for of in (fills.slices_of_steps, fills.starts_of_steps))
        reached.add(sum(name == starts[0] for name, _, _ in slices) if len(starts) == 2 else 0)
        assert_nothing_is_left(narrow)
    assert max(reached) * WIDTH < len(plan.positions(0)), "a fill was over before it was aborted"
    assert len(reached) > 2, f"all were aborted at the same slice: {reached}"
    assert_same_answers(one_by_one(narrow, [plan, other]), alone)


async def _aborted(sc: SpecCache, plan: ReusePlan, at_slice: int) -> None:
    """Serve a prompt until so many slices of it are computed."""
    engine = engine_of(sc)
    task = asyncio.ensure_future(fills.answered(engine, plan))
    while len((await engine._alive().collective_rpc(fills.slices_of_steps))[0]) < at_slice:
        assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_requests_aborted_side_by_side_leave_the_others_alone(narrow: SpecCache) -> None:
    plans = [case(narrow, seed, (60, 50)) for seed in (51, 52, 53, 54)]
    alone = one_by_one(narrow, plans)

    async def run() -> list[Any]:
        tasks = [asyncio.ensure_future(fills.answered(engine_of(narrow), plan)) for plan in plans]
        for task in tasks[::2]:
            await asyncio.sleep(0.02)
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with slow_steps(narrow, 0.005):
        found = on_its_loop(narrow, run())
    assert [isinstance(each, asyncio.CancelledError) for each in found] == [True, False] * 2
    assert_same_answers(found[1::2], alone[1::2])
    assert_nothing_is_left(narrow)


# Stored KV that is not there, or not what it should be.


def test_a_chunk_that_vanishes_between_plan_and_load_is_computed(narrow: SpecCache) -> None:
    plan = case(narrow, 61)
    gone = plan.chunks[1]
    expected = one_by_one(narrow, [_without(plan, gone)])
    in_worker(narrow, fills.forget, gone.key)
    found = one_by_one(narrow, [plan])
    assert found[0].outcome.missed_keys == (gone.key,)
    assert_same_answers(found, expected)


def _without(plan: ReusePlan, gone: PlannedChunk) -> ReusePlan:
    """The plan as it would be if one chunk were known and had no stored KV."""
    chunks = tuple(replace(c, state="missing") if c == gone else c for c in plan.chunks)
    return replace(plan, chunks=chunks)


def _wrong(kv: ChunkKV, how: str) -> ChunkKV:
    keys, values = kv.keys, kv.values
    match how:
        case "half the layers":
            return replace(kv, keys=keys[:2].clone(), values=values[:2].clone())
        case "twice the heads":
            return replace(kv, keys=torch.cat((keys, keys), 2), values=torch.cat((values, values), 2))
        case "half the head size":
            return replace(kv, keys=keys[..., :16].clone(), values=values[..., :16].clone())
        case "another dtype":
            return replace(kv, keys=keys.bfloat16(), values=values.bfloat16())
        case "another position":
            return replace(kv, position=kv.position + 1)
        case "other tokens":
            return replace(kv, token_ids=tuple(token + 1 for token in kv.token_ids))
    raise AssertionError(how)


HOW = ["half the layers", "twice the heads", "half the head size", "another dtype", "another position", "other tokens"]


@pytest.mark.parametrize("how", HOW)
def test_stored_kv_that_is_not_the_models_is_a_miss_and_harms_nobody(narrow: SpecCache, how: str) -> None:
    """Its file has the right key and a valid checksum: whoever may write to the folder can make it."""
    plan, other = case(narrow, 70 + HOW.index(how), (63, 40)), case(narrow, 79, (50,))
    expected = one_by_one(narrow, [_without(plan, plan.chunks[0]), other])
    _put_instead(narrow, plan.chunks[0], how)
    found = side_by_side(narrow, [plan, other])
    assert [each.outcome.missed_keys for each in found] == [(plan.chunks[0].key,), ()]
    assert [each.outcome.fault for each in found] == [None, None]
    assert_same_answers(found, expected)
    assert_nothing_is_left(narrow)


def _put_instead(sc: SpecCache, chunk: PlannedChunk, how: str) -> None:
    store, key = store_of(sc), ChunkKey(chunk.key)
    kv = store.get(key)
    assert kv is not None
    in_worker(sc, fills.forget, chunk.key)
    store.delete(key)
    store.put(key, _wrong(kv, how))


def test_a_corrupt_file_is_a_miss_and_harms_nobody(narrow: SpecCache) -> None:
    plan, other = case(narrow, 81, (63, 40)), case(narrow, 82, (50,))
    expected = one_by_one(narrow, [_without(plan, plan.chunks[0]), other])
    store, key = store_of(narrow), ChunkKey(plan.chunks[0].key)
    content = bytearray(store._file(key).read_bytes())
    content[-3] ^= 1
    in_worker(narrow, fills.forget, key)
    store._file(key).write_bytes(content)
    found = side_by_side(narrow, [plan, other])
    assert [each.outcome.missed_keys for each in found] == [(key,), ()]
    assert_same_answers(found, expected)


# Errors.


@pytest.mark.parametrize("where", ["load", "write", "forward"])
def test_an_error_inside_one_fill_changes_no_other_request(narrow: SpecCache, where: str) -> None:
    plans = [case(narrow, seed, (60, 50)) for seed in (91, 92, 93)]
    rng = np.random.default_rng(9)
    plans.append(ReusePlan(tokens(rng, 50)))
    alone, prefilled = one_by_one(narrow, plans), one_by_one(narrow, [plain(plan) for plan in plans])
    in_worker(narrow, fills.break_once, where)
    found = side_by_side(narrow, plans)
    broken = [answer.outcome.fault is not None for answer in found]
    assert broken[-1] is False
    assert sum(broken) == 1 or (where == "forward" and 1 <= sum(broken) <= 3)
    for answer, is_broken, reused, exact in zip(found, broken, alone, prefilled, strict=True):
        if is_broken:
            assert answer.outcome.fault == "RuntimeError: the test broke this"
        assert_same_answers([answer], [exact if is_broken else reused])
    assert_nothing_is_left(narrow)
    assert_same_answers(side_by_side(narrow, plans), alone)


@pytest.mark.parametrize("where", ["load", "answer"])
def test_an_error_in_a_question_fails_that_question_alone(narrow: SpecCache, where: str) -> None:
    plan, other = case(narrow, 95, (60, 50)), case(narrow, 96, (50,))
    expected, alone = answer_to(narrow, plan, KVDeviation()), one_by_one(narrow, [other])
    in_worker(narrow, fills.break_once, where)
    with pytest.raises(EngineError, match="the test broke this"):
        answer_to(narrow, plan, KVDeviation())
    assert_nothing_is_left(narrow)
    np.testing.assert_allclose(answer_to(narrow, plan, KVDeviation()), expected, atol=1e-5)
    assert_same_answers(one_by_one(narrow, [other]), alone)


def test_questions_beside_fills_have_the_answers_they_have_alone(narrow: SpecCache) -> None:
    plans = [case(narrow, seed, (60, 50)) for seed in (97, 98)]
    engine = engine_of(narrow)
    questions = [answer_to(narrow, plan, KVDeviation()) for plan in plans]
    alone = one_by_one(narrow, plans)

    async def run() -> list[Any]:
        asked = [engine.ask(plan, KVDeviation()) for plan in plans]
        return await asyncio.gather(*asked, *[fills.answered(engine, plan) for plan in plans])

    found = on_its_loop(narrow, run())
    for answer, expected in zip(found[:2], questions, strict=True):
        np.testing.assert_allclose(answer, expected, atol=1e-5)
    assert_same_answers(found[2:], alone)
