"""Captures: the KV of warm requests, recorded while vLLM prefills them, and put into the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from speccache_rag.engines.vllm.messages import CaptureJob
from speccache_rag.engines.vllm.worker.model import LoadedModel
from speccache_rag.engines.vllm.worker.paging import slots_of
from speccache_rag.engines.vllm.worker.ranks import all_heads
from speccache_rag.engines.vllm.worker.recorder import CaptureBuffer, Sink
from speccache_rag.errors import EngineError, SpecCacheError, StoreBusy, StoreError
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import ChunkKey, ChunkKV

logger = logging.getLogger(__name__)

KEPT_RESULTS = 1024
"""Results that nobody asked for (cancelled captures) are dropped beyond this many."""


class Captures:
    """The captures that run in this rank. The store writes on its own threads; their results wait here."""

    def __init__(self, store: ChunkStore, model: LoadedModel, block_size: int) -> None:
        self.probe: ChunkKV | None = None
        """The self-check's probe, kept instead of stored."""
        self._store = store
        self._model = model
        self._block_size = block_size
        self._buffers: dict[str, CaptureBuffer] = {}
        self._watched: Sequence[CaptureJob] = ()
        self._writing: set[str] = set()
        self._results: dict[str, int | SpecCacheError] = {}
        self._lock = threading.Lock()

    def begin_step(self, jobs: Sequence[CaptureJob], finished: Sequence[str]) -> None:
        """Before the forward: watch the requests that are being captured."""
        for request_id in finished:
            self._buffers.pop(request_id, None)
        sinks = []
        for job in jobs:
            buffer = self._buffers.get(job.request_id)
            if buffer is None:
                buffer = CaptureBuffer(job.token_ids, job.plan.start, len(self._model.layers))
                self._buffers[job.request_id] = buffer
            end = min(job.plan.start + job.plan.length, len(job.block_ids) * self._block_size)
            buffer.expect(slots_of(job.block_ids, self._block_size, end)[job.plan.start :])
            sinks.append(self._contained(job, buffer.record))
        if sinks:
            self._model.recorder.attach(sinks)
        self._watched = jobs

    def end_step(self) -> None:
        """After the forward: hand what is complete to the store."""
        if not self._watched:
            return
        self._model.recorder.detach()
        for job in self._watched:
            buffer = self._buffers.get(job.request_id)
            if buffer is not None and buffer.complete:
                del self._buffers[job.request_id]
                try:
                    self._keep(job, buffer.chunk_kv())
                except Exception as error:
                    self._fail(job, error)
        self._watched = ()

    def _contained(self, job: CaptureJob, sink: Sink) -> Sink:
        """A sink whose errors end its capture, and not the forward that it watches."""

        def contained(index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
            if job.request_id not in self._buffers:
                return
            try:
                sink(index, keys, values, slots)
            except Exception as error:
                self._fail(job, error)

        return contained

    def _fail(self, job: CaptureJob, error: Exception) -> None:
        logger.exception("the capture of a chunk failed")
        self._buffers.pop(job.request_id, None)
        self._note(job.plan.tag, EngineError(f"The KV of a chunk was not captured: {type(error).__name__}: {error}"))

    def _keep(self, job: CaptureJob, own: ChunkKV) -> None:
        heads = self._model.shape.n_heads
        keys, values = all_heads(own.keys, heads), all_heads(own.values, heads)
        kv = ChunkKV(keys, values, own.token_ids, own.position)
        if job.plan.probe:
            self.probe = kv
            self._note(job.plan.tag, kv.nbytes)
            return

        def done(result: int | StoreError) -> None:
            self._note(job.plan.tag, result)

        with self._lock:
            self._writing.add(job.plan.tag)
        if not self._store.put_soon(ChunkKey(job.plan.key), kv, done):
            done(StoreBusy("Captures come faster than the store can write them."))

    def _note(self, tag: str, result: int | SpecCacheError) -> None:
        with self._lock:
            self._writing.discard(tag)
            self._results[tag] = result
            while len(self._results) > KEPT_RESULTS:
                del self._results[next(iter(self._results))]

    def take(self, tags: Sequence[str]) -> dict[str, int | SpecCacheError]:
        """Of these captures, whose requests are over, those that ended: stored bytes, or the error. Given once."""
        with self._lock:
            ended: dict[str, int | SpecCacheError] = {t: self._results.pop(t) for t in tags if t in self._results}
            lost = [tag for tag in tags if tag not in ended and tag not in self._writing]
        return ended | {tag: EngineError("The KV of a chunk was not captured whole.") for tag in lost}
