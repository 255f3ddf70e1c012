"""The KV connector vLLM loads by `kv_connector_module_path`: a shell that delegates to its half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from speccache_rag.engines.vllm.core.lifeline import follow_parent, ignore_interrupts
from speccache_rag.engines.vllm.core.scheduler import SchedulerHalf
from speccache_rag.engines.vllm.messages import StepOrders, StepReport
from speccache_rag.engines.vllm.worker.half import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SpecCacheConnector(KVConnectorBase_V1):
    """Role shell. Scheduler duties above, worker duties below."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        ignore_interrupts()
        if role == KVConnectorRole.SCHEDULER:
            follow_parent()
            assert vllm_config.kv_transfer_config is not None
            self._scheduler = SchedulerHalf(
                max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                min_fill_tokens=vllm_config.kv_transfer_config.kv_connector_extra_config["min_fill_tokens"],
                world_size=vllm_config.parallel_config.world_size,
                n_layers=vllm_config.model_config.hf_text_config.num_hidden_layers,
            )
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost capture is a later miss, never a failed request."""
        return False

    @property
    def scheduler(self) -> SchedulerHalf:
        """The half of the scheduler role."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The half of the worker role."""
        assert self._worker is not None
        return self._worker

    # Scheduler role.

    def on_new_request(self, request: Request) -> None:  # noqa: D102
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: D102
        promised = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        # True: vLLM allocates the blocks and lets the request wait until the worker half reports that it is filled. One
        # load in a step that is not asynchronous would move all of them before the step's own forward.
        return promised, promised > 0

    def update_state_after_alloc(  # noqa: D102
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.update_state_after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:  # noqa: D102
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: D102
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            assert isinstance(report, StepReport)
            self.scheduler.update_from_report(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: D102
        return False, self.scheduler.request_finished(request)

    # Worker role. vLLM calls, in every step and in this order: bind, the forward (where there is one), start_load_kv,
    # wait_for_save, get_transfer_results, build_connector_worker_meta, clear.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:  # noqa: D102
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self.worker.before_forward(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: D102
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        self.worker.after_forward(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled when its region is filled."""

    def save_kv_layer(  # noqa: D102
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to save: captures are recorded as keys and values are written (worker/recorder.py)."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: the store writes on threads of its own."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: D102
        ended, failed = self.worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:  # noqa: D102
        return self.worker.take_report()

    def shutdown(self) -> None:  # noqa: D102
        if self._worker is not None:
            self._worker.close()
