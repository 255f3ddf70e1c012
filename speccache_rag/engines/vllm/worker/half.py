"""Worker half of the connector: load, recover positions, recompute, capture."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.layers.attention import Attention

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.engines.reuse.fill_job import Region, fill_region
from speccache_rag.engines.vllm.messages import CaptureJob, ReuseJob, SpecCacheMetadata
from speccache_rag.engines.vllm.support import attention_layers, rope_tables
from speccache_rag.engines.vllm.worker.answers import answer
from speccache_rag.engines.vllm.worker.paging import KVWriter, slots_of
from speccache_rag.engines.vllm.worker.recorder import CaptureBuffer, KVRecorder
from speccache_rag.engines.vllm.worker.sparse import SparsePrefill
from speccache_rag.errors import StoreError
from speccache_rag.store.factory import build_store
from speccache_rag.types import ChunkKey, ChunkKV

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

KEPT_OUTCOMES = 1024
"""Outcomes nobody asked for (cancelled requests) are dropped beyond this many."""


class WorkerHalf:
    """Lives in the worker process, owns the chunk store there."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        self.store = build_store(vllm_config.kv_transfer_config.kv_connector_extra_config["store"])
        self.block_size = int(vllm_config.cache_config.block_size)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.layers: dict[str, Attention] = {}
        self.probe: ChunkKV | None = None
        self._captures: dict[str, CaptureBuffer] = {}
        self._watched: list[CaptureJob] = []
        self._results: OrderedDict[str, int | StoreError] = OrderedDict()
        self._outcomes: OrderedDict[str, ReuseOutcome] = OrderedDict()
        self._answers: OrderedDict[str, np.ndarray] = OrderedDict()

    def attach(self, runner: GPUModelRunner) -> None:
        """Take the loaded model (called once, by the worker extension).

        Raises:
            UnsupportedModel: it has layers whose KV cannot be moved.
        """
        self.layers = attention_layers(runner)
        self.ropes = rope_tables(runner.model, self.layers)
        self.device = runner.device
        assert isinstance(runner.model_config.dtype, torch.dtype)
        self.dtype = runner.model_config.dtype
        self.prefill = SparsePrefill(runner)
        self.writer = KVWriter(self.layers, self.ropes, self.device)
        self.recorder = KVRecorder(self.layers)

    # Reuse.

    def reuse(self, job: ReuseJob) -> None:
        """Fill positions `job.computed .. job.end - 1`: stored KV where it is there and wanted, fresh KV elsewhere.

        An inquiry is answered instead.
        """
        if job.plan.inquiry:
            _remember(self._answers, job.plan.tag, answer(self, job))
            return
        started = time.perf_counter()
        slots = slots_of(job.block_ids, self.block_size, job.end, self.device)
        plan = job.plan
        region = Region(job.token_ids, plan.chunks, plan.recompute, plan.region_end, job.end, job.computed)

        def write(kv: ChunkKV, start: int, skip: int, length: int) -> None:
            self.writer.write(kv, slots, start, skip, length)

        hidden_s = self.store.hidden_s()
        positions, missed_keys = fill_region(region, self.store, write)
        loaded = time.perf_counter()
        load_hidden_s = self.store.hidden_s() - hidden_s
        self.prefill(job.token_ids, positions, job.block_ids, slots)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        done = time.perf_counter()
        outcome = ReuseOutcome(job.computed, missed_keys, loaded - started, load_hidden_s, done - loaded)
        _remember(self._outcomes, plan.tag, outcome)

    # Capture.

    def begin_step(self, metadata: SpecCacheMetadata) -> None:
        """Before the forward: watch the requests that are being captured."""
        for request_id in metadata.finished:
            self._captures.pop(request_id, None)
        sinks = []
        for job in metadata.capture:
            buffer = self._captures.get(job.request_id)
            if buffer is None:
                buffer = CaptureBuffer(job.token_ids, job.plan.start, len(self.layers))
                self._captures[job.request_id] = buffer
            end = min(job.plan.start + job.plan.length, len(job.block_ids) * self.block_size)
            buffer.expect(slots_of(job.block_ids, self.block_size, end, self.device)[job.plan.start :])
            sinks.append(buffer.record)
        if sinks:
            self.recorder.attach(sinks)
        self._watched = metadata.capture

    def end_step(self) -> None:
        """After the forward: store what is complete."""
        if not self._watched:
            return
        self.recorder.detach()
        for job in self._watched:
            buffer = self._captures.get(job.request_id)
            if buffer is not None and buffer.complete:
                del self._captures[job.request_id]
                _remember(self._results, job.plan.tag, self._put(job, buffer.chunk_kv()))
        self._watched = []

    def _put(self, job: CaptureJob, kv: ChunkKV) -> int | StoreError:
        if job.plan.probe:
            self.probe = kv
            return kv.nbytes
        try:
            return self.store.put(ChunkKey(job.plan.key), kv)
        except StoreError as error:
            # The engine must survive a full disk; whoever asked for the capture is told.
            return error

    # Answers to the front end (through the worker extension).

    def take_outcome(self, tag: str) -> ReuseOutcome | None:
        """What `reuse` did for a request, once; None if it had nothing to do."""
        return self._outcomes.pop(tag, None)

    def take_answer(self, tag: str) -> np.ndarray | None:
        """float32 [T], the answer to an inquiry, once."""
        return self._answers.pop(tag, None)

    def take_capture(self, tag: str) -> int | StoreError | None:
        """Stored bytes of a capture, or why it could not be stored; None if it did not complete."""
        return self._results.pop(tag, None)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def _remember(table: OrderedDict[str, Any], tag: str, value: Any) -> None:
    table[tag] = value
    while len(table) > KEPT_OUTCOMES:
        table.popitem(last=False)
