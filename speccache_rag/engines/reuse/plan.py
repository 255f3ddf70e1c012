"""The plan of one prompt: what is loaded, recomputed and computed fresh. One shape of it serves every process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

ChunkState = Literal["stored", "missing", "computed"]
"""stored: its KV is loaded. missing: it has no stored KV. computed: its stored KV is not used (plain prefill)."""

FRESH, LOADED, RECOMPUTED, MISSED = "fresh", "loaded", "recomputed", "missed"
"""What is done with a token."""


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A known chunk at positions `start .. start + length - 1` of the prompt."""

    key: str
    start: int
    length: int
    state: ChunkState = "stored"
    exact: bool = False
    """It stands behind the very tokens it was captured behind, so its stored KV is what a full prefill gives."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What happened to a prompt's tokens; the five add up to its length."""

    cached: int
    loaded: int
    recomputed: int
    missed: int
    fresh: int


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What will be done to one prompt. Made by the planner, carried out by either engine."""

    token_ids: tuple[int, ...]
    chunks: tuple[PlannedChunk, ...] = ()
    """All known chunks in the prompt, in its order, without overlaps."""
    recompute: tuple[tuple[int, int], ...] = ()
    """Chosen positions inside stored chunks, as sorted half-open ranges."""
    anchor_tokens: int | None = None
    """Length of the anchor prefix behind which all its chunks were captured."""
    kind: str = ""
    """The kind of approximation, as a digest. Empty where nothing is approximate and there is no tenant."""

    @property
    def stored(self) -> tuple[PlannedChunk, ...]:
        """The chunks whose KV is loaded."""
        return tuple(chunk for chunk in self.chunks if chunk.state == "stored")

    @property
    def region_end(self) -> int:
        """End of the reuse region: of the last chunk whose KV is loaded."""
        return max((chunk.end for chunk in self.chunks if chunk.state == "stored"), default=0)

    @property
    def fill_end(self) -> int:
        """End of what is filled: the reuse region without the prompt's last token, whose logits are needed."""
        return min(self.region_end, len(self.token_ids) - 1)

    @property
    def salt(self) -> str | None:
        """vLLM's `cache_salt`: only prompts of the same kind of approximation share its prefix cache."""
        return salt_of(self.kind)

    def actions(self, missed_keys: Collection[str] = ()) -> np.ndarray:
        """object [T]: what is done with each token, "fresh", "loaded", "recomputed" or "missed".

        `missed_keys` are stored chunks whose KV turned out to be unusable.
        """
        found = np.full(len(self.token_ids), FRESH, dtype=object)
        for start, end in self.recompute:
            found[start:end] = RECOMPUTED
        for chunk in self.chunks:
            here = found[chunk.start : chunk.end]
            if chunk.state == "missing" or chunk.key in missed_keys:
                here[:] = MISSED
            elif chunk.state == "computed":
                here[:] = RECOMPUTED
            else:
                here[here == FRESH] = LOADED
        if self.region_end == len(self.token_ids) and found[-1] == LOADED:
            found[-1] = RECOMPUTED  # its logits are needed
        return found

    def counts(self, cached: int = 0, missed_keys: Collection[str] = ()) -> TokenCounts:
        """The account of the prompt's tokens, of which the engine's prefix cache held the first `cached`."""
        done = self.actions(missed_keys)[cached:]
        loaded, recomputed, missed, fresh = ((done == kind).sum() for kind in (LOADED, RECOMPUTED, MISSED, FRESH))
        return TokenCounts(cached, int(loaded), int(recomputed), int(missed), int(fresh))

    def positions(self, computed: int, missed_keys: Collection[str] = ()) -> np.ndarray:
        """int64, sorted: the positions from `computed` to `fill_end` that a fill has to compute."""
        compute = self.actions(missed_keys)[computed : self.fill_end] != LOADED
        return computed + np.flatnonzero(compute)

    def to_params(self) -> dict[str, Any]:
        """As plain values, without the token ids, which travel with the request anyway."""
        return {
            "chunks": [asdict(c) for c in self.chunks],
            "recompute": [list(r) for r in self.recompute],
            "anchor_tokens": self.anchor_tokens,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any], token_ids: Sequence[int]) -> ReusePlan:
        """The plan that `to_params` described. `kind` is left out: it has done its work when a request is admitted."""
        chunks = tuple(PlannedChunk(**chunk) for chunk in params["chunks"])
        recompute = tuple((int(start), int(end)) for start, end in params["recompute"])
        return cls(tuple(token_ids), chunks, recompute, params["anchor_tokens"])


def salt_of(kind: str) -> str | None:
    """vLLM's `cache_salt` of a kind; None, the salt of everybody's plain prompts, for the empty one."""
    return f"speccache:{kind}" if kind else None


def runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Sorted unique positions as half-open runs of consecutive ones: [2, 3, 7] -> [(2, 4), (7, 8)]."""
    if len(positions) == 0:
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate(([0], breaks + 1))]
    ends = positions[np.concatenate((breaks, [len(positions) - 1]))] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
