"""What the scheduler half tells the worker half, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from speccache_rag.engines.vllm.plan import CapturePlan, ReusePlan


@dataclass(slots=True)
class ReuseJob:
    """Fill positions `computed .. end - 1` of a request before this step's forward."""

    request_id: str
    token_ids: list[int]
    """The prompt, at least up to `end`."""
    block_ids: list[int]
    plan: ReusePlan
    computed: int
    """Tokens vLLM's own prefix cache already covers."""
    end: int


@dataclass(slots=True)
class CaptureJob:
    """Record a request's KV as it is written in this step."""

    request_id: str
    token_ids: list[int]
    """The chunk's tokens, without the anchor."""
    block_ids: list[int]
    """Blocks the request has in this step."""
    plan: CapturePlan


@dataclass
class SpecCacheMetadata(KVConnectorMetadata):
    """One step's jobs."""

    reuse: list[ReuseJob] = field(default_factory=list)
    capture: list[CaptureJob] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Requests that ended since the last step; unfinished captures among them are dropped."""
