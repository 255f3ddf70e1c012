"""The fills that run in this rank: what the scheduler half has ordered, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from speccache_rag.engines.reuse.fill import FillJob, KVShape, Stretch
from speccache_rag.engines.vllm.messages import Answer, Fault, Filled, FillSlice, FillStart, StepReport
from speccache_rag.engines.vllm.worker.paging import KVWriter, slots_of
from speccache_rag.engines.vllm.worker.sparse import PagedPrompt, SparsePrefill, paged
from speccache_rag.store.base import ChunkStore

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RunningFill:
    """One fill between its slices."""

    order: FillStart
    job: FillJob
    prompt: PagedPrompt
    slots: torch.Tensor
    """int64 [T], the cache slot of each prompt position."""
    loaded: bool = False
    written: bool = False
    recompute_s: float = 0.0

    def write(self, writer: KVWriter) -> None:
        """Write the loaded KV, once."""

        def write(stretches: Sequence[Stretch]) -> None:
            writer.write(stretches, self.slots)

        if not self.written:
            self.job.write(write)
            self.written = True


Answerer = Callable[[RunningFill], np.ndarray]
"""Answers the question of a fill whose KV is loaded: float32 [T]."""


class Fills:
    """Carries out one step's orders after its forward.

    An error in one fill ends that fill alone: vLLM is told that its load failed, and prefills the request itself. An
    error in a question is its answer.
    """

    def __init__(
        self,
        store: ChunkStore,
        shape: KVShape,
        block_size: int,
        writer: KVWriter,
        prefill: SparsePrefill,
        answer: Answerer,
    ) -> None:
        self._store = store
        self._shape = shape
        self._block_size = block_size
        self._writer = writer
        self._prefill = prefill
        self._answer = answer
        self._fills: dict[str, RunningFill] = {}
        self._report = StepReport()
        self._ended: set[str] = set()
        self._failed: set[str] = set()

    def step(self, starts: Sequence[FillStart], slices: Sequence[FillSlice], dropped: Sequence[str]) -> None:
        """Begin, load, compute and end, as far as this step's orders go."""
        for request_id in dropped:
            if self._fills.pop(request_id, None) is not None:
                self._ended.add(request_id)
        for order in starts:
            self._guarded(order, partial(self._start, order))
        # Its slices come once every rank has loaded: what is ordered here was loaded in an earlier step.
        self._compute([s for s in slices if s.request_id in self._fills])
        for fill in list(self._fills.values()):
            if not fill.loaded:
                self._guarded(fill.order, partial(self._load, fill))

    def take_report(self) -> StepReport | None:
        """What to tell the scheduler half of this step; None if nothing happened."""
        report, self._report = self._report, StepReport()
        return report if report.loaded or report.results else None

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks vLLM may use from now on, and those of them whose fill failed."""
        ended, failed = self._ended, self._failed
        self._ended, self._failed = set(), set()
        return ended, failed

    def _start(self, order: FillStart) -> None:
        plan, block_ids = order.plan, order.block_ids
        end = plan.fill_end
        if order.question is not None:
            end = len(plan.token_ids)
            if end > len(block_ids) * self._block_size:
                # vLLM allocates nothing for a prompt's last token before it schedules it. Block 0 is the one that vLLM
                # never gives to a request.
                block_ids = (*block_ids, 0)
        slots = slots_of(block_ids, self._block_size, end)
        job = FillJob(plan, self._store, self._shape, order.computed)
        prompt = paged(plan.token_ids, block_ids)
        self._fills[order.request_id] = RunningFill(order, job, prompt, slots.to(self._prefill.device))
        job.request()

    def _load(self, fill: RunningFill) -> None:
        if fill.job.ready():
            self._report.loaded[fill.order.request_id] = 1, fill.job.load()
            fill.loaded = True

    def _compute(self, slices: Sequence[FillSlice]) -> None:
        """One sparse forward over the slices of all fills; questions are answered one by one."""
        together: list[tuple[RunningFill, FillSlice]] = []
        for slice_ in slices:
            fill = self._fills[slice_.request_id]
            if self._guarded(fill.order, partial(self._prepare, fill, slice_)):
                together.append((fill, slice_))
        wanted = [(fill.prompt, fill.job.positions[s.start : s.stop]) for fill, s in together if s.stop > s.start]
        started = time.perf_counter()
        try:
            if wanted:
                self._prefill(wanted)
        except Exception as error:
            # It cannot be told whose fault it is: vLLM computes all of them by itself.
            logger.exception("a sparse forward failed")
            for fill, _ in together:
                self._fail(fill.order, error)
            return
        spent_s = time.perf_counter() - started
        total = sum(len(positions) for _, positions in wanted)
        for fill, slice_ in together:
            if total:
                fill.recompute_s += spent_s * (slice_.stop - slice_.start) / total
            if slice_.last:
                job = fill.job
                self._end(fill.order.request_id, Filled(job.load_s, job.load_hidden_s, fill.recompute_s))

    def _prepare(self, fill: RunningFill, slice_: FillSlice) -> bool:
        """The steps before computing. Whether there is anything to compute with the others'."""
        if slice_.start == 0 and not fill.written:
            fill.job.decide(slice_.missed_keys)
        if fill.order.question is not None:
            values = self._answer(fill)
            self._end(fill.order.request_id, Answer(values.astype("<f4").tobytes()))
            return False
        fill.write(self._writer)
        return True

    def _guarded(self, order: FillStart, work: Callable[[], bool | None]) -> bool:
        """Do one fill's work. Whatever goes wrong is that fill's fault alone, and is reported with it."""
        try:
            return bool(work())
        except Exception as error:
            logger.exception("the fill of a request failed")
            self._fail(order, error)
            return False

    def _fail(self, order: FillStart, error: Exception) -> None:
        if order.question is None:  # else vLLM would prefill the prompt and ask again
            self._failed.add(order.request_id)
        self._end(order.request_id, Fault(f"{type(error).__name__}: {error}"))

    def _end(self, request_id: str, result: Filled | Answer | Fault) -> None:
        self._fills.pop(request_id, None)
        self._report.results[request_id] = result
        self._ended.add(request_id)
