"""Filling a prompt's reuse region from the store: what is loaded, and what is left to compute.

Engines differ in where KV goes (`Writer`); what a hole, a corrupt chunk or a prompt that ends inside a chunk means is
decided here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from speccache_rag.errors import StoreError
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import ChunkKey, ChunkKV

logger = logging.getLogger(__name__)

Writer = Callable[[ChunkKV, int, int, int], None]
"""Called with a chunk's KV, its start in the prompt, and the half-open range of its tokens to write there."""


@dataclass(frozen=True, slots=True)
class Region:
    """What a request wants at positions `computed .. end - 1`: stored KV where it is there, fresh KV elsewhere."""

    token_ids: Sequence[int]
    """The prompt, at least up to `end`."""
    chunks: Sequence[tuple[str, int, int]]
    """(key, start, length), in prompt order."""
    recompute: Sequence[tuple[int, int]]
    """Chosen positions as half-open ranges."""
    region_end: int
    end: int
    """`region_end`, less the last prompt token where the prompt ends inside a chunk: its logits are needed."""
    computed: int = 0
    """Positions the engine's own prefix cache already covers."""


def fill_region(region: Region, store: ChunkStore, write: Writer) -> tuple[np.ndarray, tuple[str, ...]]:
    """Write what the store has.

    A chunk that is missing, does not verify or holds other tokens is a hole: all of it is left to compute.

    Returns:
        The positions still to compute (int64, sorted, unique), and the keys of the holes.
    """
    compute = np.ones(region.end, dtype=bool)
    missed: dict[str, None] = {}
    for key, start, length in region.chunks:
        length = min(length, region.end - start)
        here = slice(start, start + length)
        skip = max(0, region.computed - start)
        if skip >= length:
            continue
        kv = stored_kv(store, ChunkKey(key), region.token_ids[here])
        if kv is None:
            missed[key] = None
            continue
        write(kv, start, skip, length)
        compute[here] = False
    for start, end in region.recompute:
        compute[start:end] = True
    compute[: region.computed] = False
    return np.flatnonzero(compute), tuple(missed)


def stored_kv(store: ChunkStore, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
    """Stored KV whose tokens begin with these; None counts as a miss. A broken store degrades to recompute."""
    try:
        kv = store.get(key)
    except StoreError as error:
        logger.warning("speccache: chunk %s is recomputed: %s", key[:12], error)
        return None
    if kv is not None and kv.token_ids[: len(token_ids)] != tuple(token_ids):
        logger.warning("speccache: chunk %s holds other tokens than the prompt; it is recomputed.", key[:12])
        return None
    return kv
