"""The scheduler half of the connector: promises tokens to vLLM, and deals their filling into its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.vllm.core.filling import Filling, deal
from speccache_rag.engines.vllm.messages import (
    PARAM,
    Answer,
    CaptureJob,
    CapturePlan,
    Fault,
    Filled,
    FillStart,
    StepOrders,
    StepReport,
    reuse_of,
)
from speccache_rag.scoring.questions import TargetQuestion

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerHalf:
    """Lives in the engine core. Plans live from `on_new_request` to `request_finished`.

    A promised region is filled while its request waits (vLLM's asynchronous load). Nothing is consumed by asking for a
    promise, so that a preempted request asks again and gets the same one.
    """

    def __init__(self, *, max_tokens: int, min_fill_tokens: int, world_size: int, n_layers: int) -> None:
        """Take the limits.

        Args:
            max_tokens: tokens that one step of vLLM may compute.
            min_fill_tokens: tokens that fills get in every step, however full it is.
            world_size: ranks that report each step.
            n_layers: of the model.
        """
        self._max_tokens = max_tokens
        self._min_fill_tokens = min_fill_tokens
        self._world_size = world_size
        self._n_layers = n_layers
        self._plans: dict[str, tuple[ReusePlan, TargetQuestion | None]] = {}
        self._captures: dict[str, tuple[CapturePlan, tuple[int, ...]]] = {}
        self._fillings: dict[str, Filling] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._starts: list[FillStart] = []
        self._dropped: list[str] = []
        self._finished: list[str] = []

    def on_new_request(self, request: Request) -> None:
        """Read what the request carries."""
        params, token_ids = request.kv_transfer_params, request.prompt_token_ids or []
        plan, question = reuse_of(params, token_ids)
        if plan.stored:
            self._plans[request.request_id] = plan, question
        if capture := CapturePlan.from_params(params):
            ids = tuple(token_ids[capture.start : capture.start + capture.length])
            self._captures[request.request_id] = capture, ids

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond vLLM's own prefix hit that need no scheduling. Free of side effects.

        A question takes the whole prompt but its last token, because the worker does all its work itself.
        """
        if request.request_id not in self._plans:
            return 0
        plan, question = self._plans[request.request_id]
        end = plan.fill_end if question is None else len(plan.token_ids) - 1
        return max(0, end - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The promise was accepted: the fill begins. Called again, without tokens, when the fill is over."""
        if num_external_tokens <= 0:
            return
        request_id = request.request_id
        plan, question = self._plans[request_id]
        computed = (plan.fill_end if question is None else len(plan.token_ids) - 1) - num_external_tokens
        self._fillings[request_id] = Filling(request_id, plan, computed, question, self._n_layers)
        self._starts.append(FillStart(request_id, plan, tuple(block_ids), computed, question))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        """This step's work: slices go into what the step's own tokens leave of its budget, or into the floor."""
        room = max(self._min_fill_tokens, self._max_tokens - scheduler_output.total_num_scheduled_tokens)
        orders = StepOrders(
            starts=self._starts,
            slices=deal(self._fillings.values(), room),
            dropped=self._dropped,
            finished=self._finished,
        )
        self._starts, self._dropped, self._finished = [], [], []
        blocks = scheduler_output.kv_connector_block_state
        for request_id in self._captures.keys() & scheduler_output.num_scheduled_tokens.keys():
            plan, token_ids = self._captures[request_id]
            block_ids = blocks.get_block_ids(request_id) if blocks else None
            if block_ids is not None:
                orders.captures.append(CaptureJob(request_id, token_ids, tuple(block_ids[0]), plan))
        return orders

    def update_from_report(self, report: StepReport) -> None:
        """What the ranks say of a step that is over."""
        for request_id, (ranks, lacking) in report.loaded.items():
            if request_id in self._fillings:  # else it was aborted meanwhile
                self._fillings[request_id].loaded(ranks, lacking, self._world_size)
        for request_id, result in report.results.items():
            filling = self._fillings.pop(request_id, None)
            if filling is None:
                continue
            if isinstance(result, Fault):
                self._dropped.append(request_id)  # ranks where nothing went wrong still hold it
                if filling.question is None:
                    del self._plans[request_id]  # vLLM prefills it from its first token
            # A request that was preempted is filled again; what its first fill found in the prefix cache counts.
            self._outcomes.setdefault(request_id, _outcome(filling, result))

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Forget the request. Returns what goes out with its last output, if anything was reused or asked."""
        request_id = request.request_id
        self._plans.pop(request_id, None)
        self._captures.pop(request_id, None)
        if self._fillings.pop(request_id, None) is not None:
            self._dropped.append(request_id)
        self._finished.append(request_id)
        outcome = self._outcomes.pop(request_id, None)
        return None if outcome is None else {PARAM: outcome}


def _outcome(filling: Filling, result: Filled | Answer | Fault) -> dict[str, Any]:
    """As plain values, for the front end."""
    if isinstance(result, Answer):
        return {"answer": result.values}
    if isinstance(result, Fault):
        return {"fault": result.message}
    return {
        "cached_tokens": filling.computed,
        "missed_keys": sorted(filling.missed_keys),
        "load_s": result.load_s,
        "load_hidden_s": result.load_hidden_s,
        "recompute_s": result.recompute_s,
    }
