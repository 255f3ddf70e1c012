"""A resumable fill of one prompt's reuse region, the same in both engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.errors import StoreError
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import ChunkKey, ChunkKV

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the model's KV looks like, all heads of it; stored KV of any other shape is a miss."""

    n_layers: int
    n_heads: int
    """KV heads of the whole model, however many ranks share them."""
    head_dim: int
    dtype: torch.dtype

    def fits(self, kv: ChunkKV) -> bool:
        """Whether stored KV has this shape."""
        layers, _, heads, head_dim = kv.keys.shape
        found = (layers, heads, head_dim, kv.keys.dtype, kv.values.dtype)
        return found == (self.n_layers, self.n_heads, self.head_dim, self.dtype, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens `skip .. length - 1` of a chunk whose first token belongs at position `start` of the prompt."""

    kv: ChunkKV
    start: int
    skip: int
    length: int

    @property
    def n_tokens(self) -> int:
        return self.length - self.skip


Writer = Callable[[Sequence[Stretch]], None]
"""Moves stored keys to their positions and writes both into the engine's cache."""


class FillJob:
    """Fills positions `computed .. plan.fill_end - 1`: stored KV where it is loaded, fresh KV elsewhere.

    Four steps: `load`, `decide`, `write`, then slices of `positions`, in order. Later positions never feed earlier
    ones, so it makes no difference to the result where the slices are cut.
    """

    def __init__(self, plan: ReusePlan, store: ChunkStore, shape: KVShape, computed: int = 0) -> None:
        self.plan = plan
        self.computed = computed
        self.positions = np.empty(0, dtype=np.int64)
        self.load_s = self.load_hidden_s = 0.0
        self._store = store
        self._shape = shape
        self._needed = [c for c in plan.stored if min(c.end, plan.fill_end) > max(c.start, computed)]
        self._kv: dict[str, ChunkKV] = {}

    @property
    def keys(self) -> list[ChunkKey]:
        """Chunks whose KV this fill reads."""
        return [ChunkKey(key) for key in dict.fromkeys(chunk.key for chunk in self._needed)]

    def request(self) -> None:
        """Begin to bring the stored KV into RAM, on the store's own threads."""
        self._store.request(self.keys)

    def ready(self) -> bool:
        """Whether no read of it is still running."""
        return self._store.ready(self.keys)

    def load(self) -> frozenset[str]:
        """Take the stored KV out of the store. Returns the keys of chunks that have none of use."""
        started, hidden_s = time.perf_counter(), self._store.hidden_s()
        for chunk in self._needed:
            if chunk.key not in self._kv and (kv := self._usable(chunk)) is not None:
                self._kv[chunk.key] = kv
        self.load_hidden_s = self._store.hidden_s() - hidden_s
        self.load_s += time.perf_counter() - started
        return frozenset(chunk.key for chunk in self._needed) - self._kv.keys()

    def decide(self, missed_keys: Collection[str]) -> None:
        """Fix the positions to compute. `missed_keys` are those that any rank lacks."""
        for key in missed_keys:
            self._kv.pop(key, None)
        self.positions = self.plan.positions(self.computed, missed_keys)

    def kv(self, key: str) -> ChunkKV | None:
        """Loaded KV of a chunk, until it is written; None where it has none of use."""
        return self._kv.get(key)

    def write(self, writer: Writer) -> None:
        """Write all loaded KV, and let go of it."""
        started = time.perf_counter()
        end = self.plan.fill_end
        writer(
            [
                Stretch(self._kv[c.key], c.start, max(0, self.computed - c.start), min(c.end, end) - c.start)
                for c in self._needed
                if c.key in self._kv
            ]
        )
        self._kv = {}
        self.load_s += time.perf_counter() - started

    def _usable(self, chunk: PlannedChunk) -> ChunkKV | None:
        """Stored KV that is this chunk's, of the model's shape; a broken store degrades to recompute."""
        try:
            kv = self._store.get(ChunkKey(chunk.key))
        except StoreError as error:
            logger.warning("chunk %s is recomputed: %s", chunk.key[:12], error)
            return None
        if kv is None:
            return None
        tokens = self.plan.token_ids[chunk.start : chunk.end]
        if kv.token_ids[: chunk.length] != tokens or not self._shape.fits(kv):
            logger.warning("chunk %s is recomputed: its stored KV has other tokens or another shape.", chunk.key[:12])
            return None
        if self.plan.anchor_tokens is not None and kv.position != self.plan.anchor_tokens:
            logger.warning("chunk %s is recomputed: its stored KV has another position.", chunk.key[:12])
            return None
        return kv
