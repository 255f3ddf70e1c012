"""Scheduler half of the connector: what a request may skip, and what the worker has to do for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speccache_rag.engines.vllm.messages import CaptureJob, ReuseJob, SpecCacheMetadata
from speccache_rag.engines.vllm.plan import CapturePlan, ReusePlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerHalf:
    """Lives in the engine core. Plans live from `on_new_request` to `request_finished`.

    A preempted request asks again and gets the same answer, because nothing here is consumed by asking.
    """

    def __init__(self) -> None:
        self._reuse: dict[str, ReusePlan] = {}
        self._capture: dict[str, tuple[CapturePlan, list[int]]] = {}
        self._jobs: list[ReuseJob] = []
        self._finished: list[str] = []

    def on_new_request(self, request: Request) -> None:
        """Read the request's plan."""
        if plan := ReusePlan.from_params(request.kv_transfer_params):
            self._reuse[request.request_id] = plan
        if capture := CapturePlan.from_params(request.kv_transfer_params):
            ids = list(request.prompt_token_ids or [])[capture.start : capture.start + capture.length]
            self._capture[request.request_id] = (capture, ids)

    def promised_end(self, request: Request) -> int:
        """End of what the worker fills: the reuse region, less the last prompt token, which vLLM must compute.

        An inquiry takes the whole prompt: the worker does all its work itself.
        """
        plan = self._reuse.get(request.request_id)
        if plan is None:
            return 0
        end = request.num_prompt_tokens if plan.inquiry else plan.region_end
        return min(end, request.num_prompt_tokens - 1)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond vLLM's own prefix hit that need no scheduling. Free of side effects."""
        return max(0, self.promised_end(request) - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """The promise was accepted: make the job."""
        if num_external_tokens <= 0:
            return
        end = self.promised_end(request)
        plan = self._reuse[request.request_id]
        token_ids = list(request.prompt_token_ids or [])[: None if plan.inquiry else end]
        job = ReuseJob(request.request_id, token_ids, block_ids, plan, end - num_external_tokens, end)
        self._jobs.append(job)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SpecCacheMetadata:
        """Ship this step's jobs."""
        meta = SpecCacheMetadata(reuse=self._jobs, finished=self._finished)
        self._jobs, self._finished = [], []
        blocks = scheduler_output.kv_connector_block_state
        for request_id in self._capture.keys() & scheduler_output.num_scheduled_tokens.keys():
            plan, token_ids = self._capture[request_id]
            block_ids = blocks.get_block_ids(request_id) if blocks else None
            if block_ids is not None:
                meta.capture.append(CaptureJob(request_id, token_ids, list(block_ids[0]), plan))
        return meta

    def request_finished(self, request: Request) -> None:
        """Forget the request."""
        self._reuse.pop(request.request_id, None)
        self._capture.pop(request.request_id, None)
        self._finished.append(request.request_id)
