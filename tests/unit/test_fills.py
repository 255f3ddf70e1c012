from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.reuse.fill import KVShape, Stretch
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.engines.vllm.messages import Answer, Fault, Filled, FillSlice, FillStart
from speccache_rag.engines.vllm.worker.fills import Fills, RunningFill
from speccache_rag.engines.vllm.worker.sparse import PagedPrompt
from speccache_rag.scoring.questions import KVDeviation
from speccache_rag.store.memory import MemoryStore
from speccache_rag.types import ChunkKey, ChunkKV

A, B = (ChunkKey(c * 64) for c in "ab")
SHAPE = KVShape(1, 1, 2, torch.float32)
BLOCK_SIZE = 4
IDS = tuple(range(100, 112))
# 0-1 fresh, 2-5 A, 6 fresh, 7-9 B, 10-11 the query.
PLAN = ReusePlan(IDS, (PlannedChunk(A, 2, 4), PlannedChunk(B, 7, 3)), ((3, 4),), 0)
POSITIONS = [0, 1, 3, 6]


class Prefill:
    """A sparse prefill that notes what it computes."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, list[int]]]] = []
        self.refused: int | None = None

    def __call__(self, wanted: Sequence[tuple[PagedPrompt, np.ndarray]]) -> None:
        self.calls.append([(int(prompt.table[0]), positions.tolist()) for prompt, positions in wanted])
        if self.refused is not None and any(prompt.table[0] == self.refused for prompt, _ in wanted):
            raise RuntimeError("the kernel failed")


class Writer:
    """A writer that notes the slots it writes."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.refused: int | None = None

    def write(self, stretches: Sequence[Stretch], slots: torch.Tensor) -> None:
        if self.refused is not None and slots[0] // BLOCK_SIZE == self.refused:
            raise IndexError("the table is too short")
        for s in stretches:
            self.slots += slots[s.start + s.skip : s.start + s.length].tolist()


class Store(MemoryStore):
    """A store whose reads take as long as the test wants, and fail when it wants."""

    is_ready = True
    error: Exception | None = None

    def ready(self, keys: Sequence[ChunkKey]) -> bool:
        return self.is_ready

    def get(self, key: ChunkKey) -> ChunkKV | None:
        if self.error is not None:
            raise self.error
        return super().get(key)


class Rank:
    """The fills of one rank with all that is around them, and an account of what it reported."""

    def __init__(self, answer: Callable[[RunningFill], np.ndarray] | None = None) -> None:
        self.store, self.prefill, self.writer = Store(1 << 20), Prefill(), Writer()
        for chunk in PLAN.chunks:
            zeros = torch.zeros(1, chunk.length, 1, 2)
            self.store.put(ChunkKey(chunk.key), ChunkKV(zeros, zeros, IDS[chunk.start : chunk.end], 0))
        tools: Any = self.writer, self.prefill, answer or _no_answer
        self.fills = Fills(self.store, SHAPE, BLOCK_SIZE, *tools)
        self.loaded: dict[str, frozenset[str]] = {}
        self.results: dict[str, Any] = {}
        self.times: Counter[str] = Counter()
        self.failed: set[str] = set()

    def step(
        self, starts: Sequence[FillStart] = (), slices: Sequence[FillSlice] = (), dropped: Sequence[str] = ()
    ) -> None:
        self.fills.step(starts, slices, dropped)
        ended, failed = self.fills.take_ended()
        self.times.update(ended)
        assert failed <= ended, "vLLM waits for the end of a fill that failed, too"
        self.failed |= failed
        report = self.fills.take_report()
        if report is not None:
            assert not self.results.keys() & report.results.keys()
            self.results |= report.results
            self.loaded |= {name: keys for name, (_, keys) in report.loaded.items()}

    @property
    def idle(self) -> bool:
        """Nothing is left behind."""
        return not self.fills._fills and self.fills.take_report() is None and self.fills.take_ended() == (set(), set())


def _no_answer(_: RunningFill) -> np.ndarray:
    raise AssertionError("nothing was asked")


def start(name: str = "r", block: int = 1, question: Any = None, computed: int = 0) -> FillStart:
    """The request has blocks `block`, `block + 1`, `block + 2`, unlike every other one's."""
    return FillStart(name, PLAN, (block, block + 1, block + 2), computed, question)


def whole(name: str = "r", missed: frozenset[str] = frozenset()) -> FillSlice:
    return FillSlice(name, 0, len(PLAN.positions(0, missed)), True, missed)


def test_a_fill_loads_writes_computes_and_ends() -> None:
    rank = Rank()
    rank.step([start()])
    assert rank.loaded == {"r": frozenset()}
    assert (rank.writer.slots, rank.prefill.calls) == ([], []), "nothing is written before every rank has loaded"
    rank.step(slices=[whole()])
    assert rank.writer.slots == [BLOCK_SIZE + p for p in (2, 3, 4, 5, 7, 8, 9)]
    assert rank.prefill.calls == [[(1, POSITIONS)]]
    assert isinstance(rank.results["r"], Filled)
    assert (rank.times, rank.failed) == ({"r": 1}, set())
    assert rank.idle


def test_slices_continue_where_the_last_one_ended_and_the_kv_is_written_once() -> None:
    rank = Rank()
    rank.step([start()])
    for begin, stop in ((0, 1), (1, 3), (3, 4)):
        rank.step(slices=[FillSlice("r", begin, stop, stop == 4)])
    assert [call[0][1] for call in rank.prefill.calls] == [[0], [1, 3], [6]]
    assert len(rank.writer.slots) == 7
    assert rank.times == {"r": 1}
    assert rank.idle


def test_a_fill_with_nothing_to_compute_runs_no_forward() -> None:
    plan = ReusePlan(IDS[2:6] + IDS[-2:], (PlannedChunk(A, 0, 4),), (), 0)
    rank = Rank()
    rank.step([FillStart("r", plan, (1, 2), 0)])
    rank.step(slices=[FillSlice("r", 0, 0, True)])
    assert (rank.prefill.calls, len(rank.writer.slots), rank.times) == ([], 4, {"r": 1})


def test_the_slices_of_all_fills_are_one_forward() -> None:
    rank = Rank()
    rank.step([start("r", 1), start("s", 5)])
    rank.step(slices=[whole("r"), FillSlice("s", 0, 2, False)])
    assert rank.prefill.calls == [[(1, POSITIONS), (5, [0, 1])]]
    assert rank.times == {"r": 1}
    rank.step(slices=[FillSlice("s", 2, 4, True)])
    assert rank.times == {"r": 1, "s": 1}
    assert rank.idle


def test_a_fill_waits_for_its_kv_and_other_fills_do_not() -> None:
    rank = Rank()
    rank.store.is_ready = False
    rank.step([start("r", 1)])
    rank.step()
    assert rank.loaded == {}
    rank.store.is_ready = True
    rank.step([start("s", 5)])
    assert rank.loaded.keys() == {"r", "s"}


def test_a_chunk_that_vanishes_before_it_is_loaded_is_told_and_computed() -> None:
    rank = Rank()
    rank.store.is_ready = False
    rank.step([start()])
    rank.store.delete(A)
    rank.store.is_ready = True
    rank.step()
    assert rank.loaded == {"r": frozenset({A})}
    rank.step(slices=[whole(missed=frozenset({A}))])
    assert rank.prefill.calls == [[(1, [0, 1, 2, 3, 4, 5, 6])]]
    assert isinstance(rank.results["r"], Filled)


def test_a_chunk_that_vanishes_once_it_is_loaded_is_there_all_the_same() -> None:
    rank = Rank()
    rank.step([start()])
    rank.store.delete(A)
    rank.step(slices=[whole()])
    assert len(rank.writer.slots) == 7


# Aborts.


@pytest.mark.parametrize("slices_done", [0, 1, 2])
def test_a_dropped_fill_ends_at_once_and_leaves_nothing(slices_done: int) -> None:
    rank = Rank()
    rank.step([start("r", 1), start("s", 5)])
    for i in range(slices_done):
        rank.step(slices=[FillSlice("r", i, i + 1, False)])
    rank.step(dropped=["r"])
    assert (rank.times, rank.results) == ({"r": 1}, {})
    # vLLM gives its blocks to another one; a slice that was on its way is not computed.
    calls = len(rank.prefill.calls)
    rank.step(slices=[FillSlice("r", slices_done, 4, True)], dropped=["r"])
    assert (len(rank.prefill.calls), rank.times) == (calls, {"r": 1})
    rank.step(slices=[whole("s")])
    assert rank.times == {"r": 1, "s": 1}
    assert rank.idle


def test_a_fill_that_has_ended_is_not_reported_again_when_it_is_dropped() -> None:
    rank = Rank()
    rank.step([start()])
    rank.step(slices=[whole()])
    rank.step(dropped=["r"])
    assert rank.times == {"r": 1}


def test_a_request_that_was_preempted_is_filled_again() -> None:
    rank = Rank()
    for block in (1, 9):
        rank.results = {}
        rank.step([start(block=block)])
        rank.step(slices=[whole()])
    assert rank.times == {"r": 2}
    assert [call[0][0] for call in rank.prefill.calls] == [1, 9]


# Faults. Each ends its own fill; "s" is another request beside it.


def assert_only_r_failed(rank: Rank, message: str) -> None:
    assert rank.results["r"] == Fault(message)
    assert isinstance(rank.results["s"], Filled)
    assert (rank.failed, rank.times) == ({"r"}, {"r": 1, "s": 1})
    assert rank.idle


def test_an_error_at_the_start_fails_that_fill_alone() -> None:
    rank = Rank()
    rank.step([FillStart("r", PLAN, (1,), 0), start("s", 5)])  # fewer blocks than positions
    rank.step(slices=[whole("r"), whole("s")])
    assert isinstance(rank.results["r"], Fault)
    assert_only_r_failed(rank, rank.results["r"].message)


def test_an_error_in_loading_fails_that_fill_alone() -> None:
    rank = Rank()
    rank.store.error = MemoryError("no room for it")
    rank.step([start("r", 1)])
    rank.store.error = None
    rank.step([start("s", 5)], [whole("r")])
    rank.step(slices=[whole("s")])
    assert_only_r_failed(rank, "MemoryError: no room for it")


def test_an_error_in_writing_fails_that_fill_alone() -> None:
    rank = Rank()
    rank.writer.refused = 1
    rank.step([start("r", 1), start("s", 5)])
    rank.step(slices=[whole("r"), whole("s")])
    assert_only_r_failed(rank, "IndexError: the table is too short")
    assert rank.prefill.calls == [[(5, POSITIONS)]]


def test_an_error_in_the_forward_fails_the_fills_that_are_in_it() -> None:
    rank = Rank()
    rank.prefill.refused = 1
    rank.step([start("r", 1), start("t", 9), start("s", 5)])
    rank.step(slices=[whole("r"), FillSlice("t", 0, 1, False)])
    assert rank.results["t"] == rank.results.pop("r"), "it cannot be told whose fault it was"
    assert (rank.failed, rank.times) == ({"r", "t"}, {"r": 1, "t": 1})
    rank.step(slices=[whole("s"), FillSlice("t", 1, 4, True)])
    assert isinstance(rank.results["s"], Filled)
    assert rank.prefill.calls[-1] == [(5, POSITIONS)]
    assert rank.idle


# Questions.


def question(name: str, block: int = 1) -> FillStart:
    return start(name, block, KVDeviation())


def test_a_question_is_answered_with_the_kv_of_its_chunks_and_fills_go_on_beside_it() -> None:
    def answer(fill: RunningFill) -> np.ndarray:
        assert fill.job.kv(A) is not None
        assert fill.job.positions.tolist() == POSITIONS
        return np.arange(len(IDS), dtype=np.float64)

    rank = Rank(answer)
    rank.step([question("q"), start("s", 5)])
    rank.step(slices=[whole("q"), whole("s")])
    assert rank.results["q"] == Answer(np.arange(len(IDS), dtype="<f4").tobytes())
    assert isinstance(rank.results["s"], Filled)
    assert rank.prefill.calls == [[(5, POSITIONS)]]
    assert (rank.times, rank.failed) == ({"q": 1, "s": 1}, set())
    assert rank.idle


def test_the_last_token_of_a_question_has_a_place_where_vllm_gave_it_none() -> None:
    seen: list[list[int]] = []

    def answer(fill: RunningFill) -> np.ndarray:
        seen.append(fill.slots.tolist())
        return np.zeros(len(fill.slots))

    plan = ReusePlan((*IDS, 7), PLAN.chunks, (), 0)  # 13 tokens: three blocks hold all but the last
    rank = Rank(answer)
    rank.step([FillStart("q", plan, (1, 2, 3), 0, KVDeviation())])
    rank.step(slices=[FillSlice("q", 0, 3, True)])
    assert seen == [[*range(4, 16), 0]]


@pytest.mark.parametrize("where", ["start", "load", "answer"])
def test_an_error_in_a_question_fails_the_question_and_is_no_failed_load(where: str) -> None:
    """vLLM would prefill the prompt of a failed load, and ask for the same promise again."""

    def answer(_: RunningFill) -> np.ndarray:
        raise ZeroDivisionError("no such layer")

    rank = Rank(answer)
    asked = question("q")
    if where == "start":
        rank.store.request = lambda keys: 1 / 0  # type: ignore[method-assign,assignment]
    if where == "load":
        rank.store.error = ZeroDivisionError("no such file")
    rank.step([asked])
    rank.store.error = None
    if where == "start":
        del rank.store.request
    rank.step([start("s", 5)], [whole("q")])
    rank.step(slices=[whole("s")])
    assert isinstance(rank.results["q"], Fault)
    assert rank.results["q"].message.startswith("ZeroDivisionError")
    assert isinstance(rank.results["s"], Filled)
    assert (rank.failed, rank.times) == (set(), {"q": 1, "s": 1})
    assert rank.idle
