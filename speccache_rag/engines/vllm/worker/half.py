"""The worker half of the connector: carries out one step's orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speccache_rag.engines.vllm.messages import StepOrders, StepReport
from speccache_rag.engines.vllm.worker.captures import Captures
from speccache_rag.engines.vllm.worker.fills import Fills, RunningFill
from speccache_rag.engines.vllm.worker.kv_deviation import kv_deviation
from speccache_rag.engines.vllm.worker.model import LoadedModel
from speccache_rag.engines.vllm.worker.query_attention import query_attention
from speccache_rag.scoring.questions import KVDeviation
from speccache_rag.store.factory import build_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WorkerHalf:
    """Lives in the process of each rank, and owns the chunk store there."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        assert vllm_config.kv_transfer_config is not None
        self.store = build_store(vllm_config.kv_transfer_config.kv_connector_extra_config["store"])
        self.block_size = int(vllm_config.cache_config.block_size)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self._captures: Captures | None = None
        self._fills: Fills | None = None

    def attach(self, runner: GPUModelRunner) -> None:
        """Take the loaded model (called once, by the worker extension).

        Raises:
            UnsupportedModel: it has layers whose KV cannot be moved.
        """
        model = self.model = LoadedModel(runner, self.block_size)
        self._captures = Captures(self.store, model, self.block_size)
        self._fills = Fills(self.store, model.shape, self.block_size, model.writer, model.prefill, self._answer)

    def before_forward(self, orders: StepOrders) -> None:
        """Watch the requests that this step captures."""
        if self._captures is not None:
            self._captures.begin_step(orders.captures, orders.finished)

    def after_forward(self, orders: StepOrders) -> None:
        """Keep what was captured; then fill, so that nothing of a fill is recorded as a capture."""
        if self._captures is not None and self._fills is not None:
            self._captures.end_step()
            self._fills.step(orders.starts, orders.slices, orders.dropped)

    @property
    def captures(self) -> Captures:
        """The captures of this rank."""
        assert self._captures is not None
        return self._captures

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Requests whose fill has ended, and those of them whose fill failed."""
        return self._fills.take_ended() if self._fills is not None else (set(), set())

    def take_report(self) -> StepReport | None:
        """What to tell the scheduler half of this step; None if nothing happened."""
        return self._fills.take_report() if self._fills is not None else None

    def _answer(self, fill: RunningFill) -> np.ndarray:
        question = fill.order.question
        if isinstance(question, KVDeviation):
            return kv_deviation(self.model, fill, question)
        assert question is not None
        return query_attention(self.model, fill, question)

    def close(self) -> None:
        """Close the store."""
        self.store.close()
