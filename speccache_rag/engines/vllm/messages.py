"""Messages between the three processes of the vLLM engine: with a request, with a step, and back with its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.scoring.questions import KVDeviation, QueryAttention, TargetQuestion

PARAM = "speccache"
"""Our key in a request's `kv_transfer_params`, on the way in and on the way out."""

_QUESTIONS: dict[str, type[TargetQuestion]] = {kind.__name__: kind for kind in (KVDeviation, QueryAttention)}

# From the front end to the scheduler, with a request.


def reuse_params(plan: ReusePlan, question: TargetQuestion | None = None) -> dict[str, Any]:
    """`kv_transfer_params` of a request that reuses chunk KV, or of one that asks a question about a prompt."""
    asked = None if question is None else {"kind": type(question).__name__, **asdict(question)}
    return {PARAM: {"plan": plan.to_params(), "question": asked}}


def reuse_of(params: Mapping[str, Any] | None, token_ids: Sequence[int]) -> tuple[ReusePlan, TargetQuestion | None]:
    """What `reuse_params` said; an empty plan where a request carries none."""
    body = (params or {}).get(PARAM) or {}
    if "plan" not in body:
        return ReusePlan(tuple(token_ids)), None
    asked = dict(body["question"]) if body["question"] else None
    question = _QUESTIONS[asked.pop("kind")](**asked) if asked else None
    return ReusePlan.from_params(body["plan"], token_ids), question


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A warm request: record the KV of the tokens after the anchor."""

    key: str
    start: int
    length: int
    tag: str
    """Our name for the request in the worker: vLLM renames requests inside the engine."""
    probe: bool = False
    """Keep the KV in the worker for the self-check instead of storing it."""

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params`."""
        return {PARAM: {"capture": asdict(self)}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> CapturePlan | None:
        """The capture in a request's `kv_transfer_params`, if it has one."""
        body = (params or {}).get(PARAM) or {}
        return cls(**body["capture"]) if "capture" in body else None


# From the scheduler to every rank, with a step.


@dataclass(frozen=True, slots=True)
class FillStart:
    """Begin to fill positions `computed .. plan.fill_end - 1` of a request, or to answer a question about it."""

    request_id: str
    plan: ReusePlan
    block_ids: tuple[int, ...]
    computed: int
    """Positions that vLLM's own prefix cache covers."""
    question: TargetQuestion | None = None


@dataclass(frozen=True, slots=True)
class FillSlice:
    """Compute entries `start .. stop - 1` of a fill's sorted positions; the last slice ends the fill.

    A question is answered whole, in one slice.
    """

    request_id: str
    start: int
    stop: int
    last: bool
    missed_keys: frozenset[str] = frozenset()
    """Chunks whose KV some rank lacks."""


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """Record a request's KV as it is written in this step."""

    request_id: str
    token_ids: tuple[int, ...]
    """The chunk's tokens, without the anchor."""
    block_ids: tuple[int, ...]
    """Blocks the request has in this step."""
    plan: CapturePlan


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's work for the worker half."""

    starts: list[FillStart] = field(default_factory=list)
    slices: list[FillSlice] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Fills whose request was aborted, or that failed on some rank."""
    captures: list[CaptureJob] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Requests that ended since the last step; unfinished captures among them are dropped."""


# From every rank back to the scheduler, with a step's output.


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of one piece of work, as text: exceptions do not cross processes safely."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question: float32 [T], little endian, as bytes."""

    values: bytes


@dataclass(frozen=True, slots=True)
class Filled:
    """A finished fill. Seconds are those of the slowest rank."""

    load_s: float
    load_hidden_s: float
    recompute_s: float


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What one step brought, of one rank or of several together."""

    loaded: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Fills whose stored KV is in RAM: the number of ranks that say so, and the keys that one of them lacks."""
    results: dict[str, Filled | Answer | Fault] = field(default_factory=dict)
    """Fills and questions that ended."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Both reports as one: ranks add up, lacking keys unite, a fault on any rank is the fault of all."""
        assert isinstance(other, StepReport)
        loaded = dict(self.loaded)
        for request_id, (ranks, lacking) in other.loaded.items():
            before, known = loaded.get(request_id, (0, frozenset()))
            loaded[request_id] = before + ranks, known | lacking
        results = dict(self.results)
        for request_id, result in other.results.items():
            mine = results.setdefault(request_id, result)
            if isinstance(result, Fault):
                results[request_id] = result
            elif isinstance(mine, Filled) and isinstance(result, Filled):
                pairs = zip(asdict(mine).values(), asdict(result).values(), strict=True)
                results[request_id] = Filled(*(max(pair) for pair in pairs))
        return StepReport(loaded, results)
