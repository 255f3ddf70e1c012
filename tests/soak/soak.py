"""A soak: mixed requests in one crowded engine give the answers that each gives to itself in a fresh one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag import SpecCache
from speccache_rag.engines.base import CaptureRequest, ReuseOutcome
from speccache_rag.engines.vllm.frontend.engine import VllmEngine
from speccache_rag.types import ChunkKey
from tests.conftest import tiny_engine_options
from tests.parity.engines import store_of
from tests.parity.fills import assert_nothing_is_left, forget, on_its_loop, slow_steps, starts_of_steps
from tests.parity.vllm_kv import engine_of, in_worker
from tests.soak.mix import ANCHOR, Item, Mix

TIE = 1e-3
"""Two tokens whose logprobs are nearer than this are both right: sums in another order decide between them."""
REPEATS = 4
"""How often an item is asked, on average."""
CACHE_TOKENS = 1280
AT_ONCE = 10
"""Requests in flight; the engine has seats for eight, and a KV cache for four or five."""


@dataclass(frozen=True)
class Answer:
    """What came of an item: greedy tokens with logprobs, or the answer to its question."""

    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[Mapping[int, float]] = ()
    values: np.ndarray | None = None
    outcome: ReuseOutcome | None = None


@dataclass
class SoakReport:
    """What happened."""

    requests: int = 0
    cancelled: int = 0
    missed_chunks: int = 0
    cached_tokens: int = 0
    filled_again: int = 0
    """Requests that were preempted and filled a second time."""
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def soak(
    folder: Path, work: Path, n_requests: int, seed: int, progress: Callable[[], None] = lambda: None
) -> SoakReport:
    """Ask a fresh engine for each item alone, then one engine for all of them at once, again and again.

    Args:
        folder: the model.
        work: an empty folder for the store.
        n_requests: requests to the crowded engine.
        seed: of everything that is random.
        progress: called after each request.
    """
    mix = Mix(seed)
    items = mix.items(max(7, n_requests // REPEATS))
    with _engine(folder, work) as fresh:
        _prepare(fresh, mix)
        expected = {}
        for item in items:
            fresh.reset_prefix_cache()
            expected[item.name] = on_its_loop(fresh, _ask(engine_of(fresh), item))
    report = SoakReport()
    with _engine(folder, work) as crowded:
        _prepare(crowded, mix)
        with slow_steps(crowded, 0.0):
            on_its_loop(crowded, _crowd(engine_of(crowded), items, expected, report, n_requests, seed, progress))
            begun = Counter(in_worker(crowded, starts_of_steps))
        report.filled_again = sum(count > 1 for count in begun.values())
        assert_nothing_is_left(crowded)
    return report


def _engine(folder: Path, work: Path) -> SpecCache:
    options = tiny_engine_options(
        max_num_batched_tokens=64, min_fill_tokens=8, kv_cache_memory_bytes=CACHE_TOKENS * 2048, block_size=32
    )
    return SpecCache(model=str(folder), store=str(work), engine_options=options).start()


def _prepare(sc: SpecCache, mix: Mix) -> None:
    """Capture what is not stored yet, and damage the files that are to be damaged."""

    async def capture() -> None:
        engine = engine_of(sc)
        chunks = [*mix.chunks, *mix.corrupt]
        lacking = ~engine.present([chunk.key for chunk in chunks])
        wanted = [CaptureRequest(chunk, ANCHOR) for chunk, lacks in zip(chunks, lacking, strict=True) if lacks]
        await asyncio.gather(*[engine.capture(request) for request in wanted])

    on_its_loop(sc, capture())
    store = store_of(sc)
    for chunk in mix.corrupt:
        file = store._file(ChunkKey(chunk.key))
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        in_worker(sc, forget, chunk.key)
        file.write_bytes(content)


async def _crowd(
    engine: VllmEngine,
    items: Sequence[Item],
    expected: Mapping[str, Answer],
    report: SoakReport,
    n_requests: int,
    seed: int,
    progress: Callable[[], None],
) -> None:
    rng = np.random.default_rng(seed)
    seats = asyncio.Semaphore(AT_ONCE)

    async def one(item: Item, cancel_after_s: float | None) -> None:
        async with seats:
            try:
                found = await asyncio.wait_for(_ask(engine, item), cancel_after_s)
            except TimeoutError:
                report.cancelled += 1
            else:
                report.wrong += [f"{item.name}: {fault}" for fault in faults_of(found, expected[item.name])]
                if found.outcome is not None:
                    report.missed_chunks += len(found.outcome.missed_keys)
                    report.cached_tokens += found.outcome.cached_tokens
            report.requests += 1
            report.kinds[item.name.rstrip("0123456789 ")] += 1
            progress()

    asked = [
        (items[int(i)], float(rng.exponential(0.2)) if rng.random() < 0.2 else None)
        for i in rng.integers(0, len(items), n_requests)
    ]
    await asyncio.gather(*[one(item, cancel_after_s) for item, cancel_after_s in asked])


async def _ask(engine: VllmEngine, item: Item) -> Answer:
    if item.question is not None:
        return Answer(values=await engine.ask(item.plan, item.question))
    sampling: dict[str, Any] = {"max_tokens": item.n_tokens, "temperature": 0.0, "logprobs": 5, "ignore_eos": True}
    ids: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    outcome = None
    async for delta in engine.generate(item.plan, sampling):
        ids += delta.token_ids
        logprobs += delta.logprobs or []
        outcome = delta.outcome
    return Answer(tuple(ids), logprobs, None, outcome)


def faults_of(found: Answer, expected: Answer) -> list[str]:
    """Where two answers differ in earnest; behind a tie they may go different ways."""
    if found.outcome is not None and found.outcome.fault is not None:
        return [f"fault: {found.outcome.fault}"]
    if expected.values is not None:
        assert found.values is not None
        near = np.allclose(found.values, expected.values, atol=1e-4, rtol=1e-3, equal_nan=True)
        return [] if near else ["another answer to the question"]
    if len(found.token_ids) != len(expected.token_ids):
        return [f"{len(found.token_ids)} tokens instead of {len(expected.token_ids)}"]
    for step, (ours, theirs) in enumerate(zip(found.token_ids, expected.token_ids, strict=True)):
        logprobs = expected.logprobs[step]
        apart = max(abs(found.logprobs[step][t] - logprobs[t]) for t in found.logprobs[step].keys() & logprobs.keys())
        if apart > TIE:
            return [f"logprobs of token {step} are {apart:.4f} apart"]
        if ours != theirs:
            tied = ours in logprobs and abs(logprobs[ours] - logprobs[theirs]) <= TIE
            return [] if tied else [f"token {step} is {ours} instead of {theirs}"]
    return []
