"""What the laws of fills need: answers of a running vLLM engine, alone and side by side, and a hand in its worker."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from speccache_rag import SpecCache
from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.vllm.frontend.engine import VllmEngine
from speccache_rag.errors import EngineError
from tests.hosts import host_of
from tests.integration.processes import wait_until
from tests.parity.engines import LOGPROB_ATOL
from tests.parity.vllm_kv import engine_of, in_worker

T = TypeVar("T")
_kinds = itertools.count()


@dataclass(frozen=True)
class Answered:
    """A greedy answer, and what was done to its prompt."""

    token_ids: tuple[int, ...]
    logprobs: Sequence[Mapping[int, float]]
    outcome: ReuseOutcome


def of_its_own_kind(plan: ReusePlan) -> ReusePlan:
    """The same plan where vLLM's prefix cache holds nothing for it."""
    return replace(plan, kind=f"law {next(_kinds)}")


async def answered(engine: VllmEngine, plan: ReusePlan, n_tokens: int = 6) -> Answered:
    """Serve a prompt over a cold prefix cache."""
    ids: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    sampling = {"max_tokens": n_tokens, "temperature": 0.0, "logprobs": 8, "ignore_eos": True}
    last = None
    async for last in engine.generate(of_its_own_kind(plan), sampling):
        ids += last.token_ids
        logprobs += last.logprobs or []
    assert last is not None and last.outcome is not None
    return Answered(tuple(ids), logprobs, last.outcome)


def on_its_loop(sc: SpecCache, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the engine's loop."""
    return host_of(sc).loop.run(work)


def one_by_one(sc: SpecCache, plans: Sequence[ReusePlan], n_tokens: int = 6) -> list[Answered]:
    """Each prompt with the engine to itself."""
    return [on_its_loop(sc, answered(engine_of(sc), plan, n_tokens)) for plan in plans]


def side_by_side(sc: SpecCache, plans: Sequence[ReusePlan], n_tokens: int = 6) -> list[Answered]:
    """All prompts at once."""

    async def run() -> list[Answered]:
        return await asyncio.gather(*[answered(engine_of(sc), plan, n_tokens) for plan in plans])

    return on_its_loop(sc, run())


def assert_same_answers(found: Sequence[Answered], expected: Sequence[Answered], atol: float = LOGPROB_ATOL) -> None:
    """Equal tokens, and equal logprobs of those that both report."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert all(abs(a[token] - b[token]) <= atol for token in a.keys() & b.keys()), (a, b)


def assert_nothing_is_left(sc: SpecCache) -> None:
    """No fill runs in the worker, and every block of vLLM's pool is free: only then it lets its cache be reset.

    An abort takes a step or two to get around.
    """

    def idle() -> bool:
        if in_worker(sc, _running):
            return False
        try:
            sc.reset_prefix_cache()
        except EngineError:
            return False
        return True

    assert wait_until(idle, seconds=10), f"still there: {in_worker(sc, _running)}"


def assert_a_decode_beside_fills_is_the_decode_alone(
    sc: SpecCache, plain: ReusePlan, fills: Sequence[ReusePlan]
) -> None:
    """Token by token and logprob by logprob, while other requests are filled in the same steps."""
    n_tokens = 120
    alone = one_by_one(sc, [plain], n_tokens)
    filled_alone = one_by_one(sc, fills, 2)

    async def run() -> tuple[Answered, list[Answered], bool]:
        decoding = asyncio.ensure_future(answered(engine_of(sc), plain, n_tokens))
        await asyncio.sleep(0.05)
        filled = []
        for plan in fills:  # one after the other, so that fills begin all through the decode
            filled.append(await answered(engine_of(sc), plan, 2))
        beside = not decoding.done()
        return await decoding, filled, beside

    decoded, filled, beside = on_its_loop(sc, run())
    assert beside, "the decode was over before the fills were: the law shows nothing"
    assert_same_answers([decoded], alone)
    assert_same_answers(filled, filled_alone)


# In the worker.


@contextmanager
def slices_cut(sc: SpecCache, width: int) -> Iterator[None]:
    """Every slice is computed in pieces of at most `width` positions, each by a step of the worker's own."""
    with _stepping(sc, partial(_cut, width=width)):
        yield
        assert in_worker(sc, _pieces) > 1, "nothing was cut"


@contextmanager
def slow_steps(sc: SpecCache, pause_s: float) -> Iterator[None]:
    """Every step that fills takes that much longer; the worker counts them."""
    with _stepping(sc, partial(_slow, pause_s=pause_s)):
        yield


@contextmanager
def _stepping(sc: SpecCache, change: Any) -> Iterator[None]:
    in_worker(sc, _wrap_step, change)
    try:
        yield
    finally:
        in_worker(sc, _unwrap_step)


def _fills(worker: Any) -> Any:
    return worker._speccache()._fills


def _running(worker: Any) -> list[str]:
    return list(_fills(worker)._fills)


def _pieces(worker: Any) -> int:
    return int(worker.pieces)


def slices_of_steps(worker: Any) -> list[tuple[str, int, int]]:
    """The slices computed since `slow_steps` began: (request id, first, past the last)."""
    return list(worker.slices)


def starts_of_steps(worker: Any) -> list[str]:
    """Requests whose fill has begun since `slow_steps` began; one that was preempted has begun twice."""
    return list(worker.starts)


def _wrap_step(worker: Any, change: Any) -> None:
    worker.pieces, worker.slices, worker.starts = 0, [], []
    fills = _fills(worker)
    fills.step = change(worker, fills.step)


def _unwrap_step(worker: Any) -> None:
    del _fills(worker).step


def _cut(worker: Any, step: Any, width: int) -> Any:
    def stepped(starts: Any, slices: Any, dropped: Any) -> None:
        step(starts, (), dropped)
        for whole in slices:
            for start in range(whole.start, max(whole.stop, whole.start + 1), width):
                stop = min(whole.stop, start + width)
                worker.pieces += 1
                step((), [replace(whole, start=start, stop=stop, last=whole.last and stop == whole.stop)], ())

    return stepped


def _slow(worker: Any, step: Any, pause_s: float) -> Any:
    def stepped(starts: Any, slices: Any, dropped: Any) -> None:
        worker.slices += [(s.request_id, s.start, s.stop) for s in slices]
        worker.starts += [s.request_id for s in starts]
        if starts or slices:
            time.sleep(pause_s)
        step(starts, slices, dropped)

    return stepped


def break_once(worker: Any, where: str) -> None:
    """The next time the worker does this for a fill, it fails."""
    fills = _fills(worker)
    owner, name = {
        "load": (fills._store, "get"),
        "write": (fills._writer, "write"),
        "forward": (fills, "_prefill"),
        "answer": (fills, "_answer"),
    }[where]
    setattr(owner, name, _FailsOnce(owner, name, getattr(owner, name)))


class _FailsOnce:
    """Stands in front of a callable for one call, which it fails."""

    def __init__(self, owner: Any, name: str, real: Any) -> None:
        self._owner, self._name, self._real = owner, name, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        setattr(self._owner, self._name, self._real)
        raise RuntimeError("the test broke this")


def forget(worker: Any, key: str) -> None:
    """Remove a chunk from the worker's store, RAM and all."""
    worker._speccache().store.delete(key)
