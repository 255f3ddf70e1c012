"""What a request carries to the connector, as plain values in vLLM's `kv_transfer_params`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from speccache_rag.engines.reuse import plan as neutral
from speccache_rag.scoring.layers import LayerRange

PARAM = "speccache"
"""Our key in `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question of a selection policy about a prompt (inquiry.py answers it)."""

    kind: Literal["kv_deviation", "query_attention"]
    of: Literal["value", "key"] = "value"
    """kv_deviation: of what."""
    layer: int = 1
    """kv_deviation: at which layer index."""
    layers: LayerRange = "last_third"
    """query_attention: over which layers."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Which stored chunks go where, and which of their tokens are recomputed."""

    chunks: tuple[tuple[str, int, int], ...]
    """(key, start, length), in prompt order."""
    recompute: tuple[tuple[int, int], ...]
    """Selected chunk positions as half-open ranges."""
    region_end: int
    tag: str = ""
    """Our name for the request in the worker: vLLM renames requests inside the engine."""
    inquiry: Inquiry | None = None
    """Answer this about the prompt instead of serving it."""

    @classmethod
    def of(cls, plan: neutral.ReusePlan, tag: str = "", inquiry: Inquiry | None = None) -> ReusePlan:
        """What the worker has to know of a prompt's plan; an inquiry is about stored KV alone."""
        chunks = tuple((chunk.key, chunk.start, chunk.length) for chunk in plan.stored)
        return cls(chunks, () if inquiry else plan.recompute, plan.region_end, tag, inquiry)

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params`."""
        return {
            PARAM: {
                "chunks": [list(c) for c in self.chunks],
                "recompute": [list(r) for r in self.recompute],
                "region_end": self.region_end,
                "tag": self.tag,
                "inquiry": asdict(self.inquiry) if self.inquiry else None,
            }
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> ReusePlan | None:
        """The plan in a request's `kv_transfer_params`, if it has one."""
        body = (params or {}).get(PARAM)
        if not body or "chunks" not in body:
            return None
        return cls(
            tuple((str(k), int(s), int(n)) for k, s, n in body["chunks"]),
            tuple((int(a), int(b)) for a, b in body["recompute"]),
            int(body["region_end"]),
            str(body["tag"]),
            Inquiry(**body["inquiry"]) if body["inquiry"] else None,
        )

    def salt(self) -> str:
        """vLLM `cache_salt`: KV under this plan is approximate, so only the same plan may hit its prefix cache."""
        # What an inquiry leaves in its blocks is nothing that any request may find.
        own = [self.tag] if self.inquiry else []
        text = json.dumps([self.chunks, self.recompute, self.region_end, *own], separators=(",", ":"))
        return f"{PARAM}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A warm request: record the KV of the tokens after the anchor."""

    key: str
    start: int
    length: int
    tag: str
    """Our name for the request in the worker."""
    probe: bool = False
    """Keep the KV in the worker for the self-check instead of storing it."""

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params`."""
        return {PARAM: {"capture": asdict(self)}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> CapturePlan | None:
        """The capture in a request's `kv_transfer_params`, if it has one."""
        body = (params or {}).get(PARAM)
        return cls(**body["capture"]) if body and "capture" in body else None
