"""A prompt's prefill: plain, or over stored chunk KV."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import Cache

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.engines.reuse.fill_job import Region, fill_region
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import ChunkKV


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt's KV, the logits [V] of its last token, and what was reused."""

    cache: Cache
    logits: torch.Tensor
    outcome: ReuseOutcome


def prefill(target: TargetModel, store: ChunkStore, plan: ReusePlan) -> Prefilled:
    """Prefill a prompt as planned.

    With stored chunks: load their KV and recover its positions, compute the other tokens of the reuse region, then
    prefill what follows. Without: plain prefill.
    """
    if not plan.stored:
        cache, logits = target.prefill(plan.token_ids)
        return Prefilled(cache, logits, ReuseOutcome())
    end = plan.fill_end
    reuse = ReuseCache(target.shape, end)

    def write(kv: ChunkKV, start: int, skip: int, length: int) -> None:
        reuse.write(kv, target.rope, start, skip, length)

    started, hidden_s = time.perf_counter(), store.hidden_s()
    positions, missed_keys = fill_region(region_of(plan), store, write)
    target.synchronize()
    loaded = time.perf_counter()
    load_hidden_s = store.hidden_s() - hidden_s
    target.recompute(plan.token_ids[:end], positions, reuse)
    target.synchronize()
    outcome = ReuseOutcome(
        missed_keys=missed_keys,
        load_s=loaded - started,
        load_hidden_s=load_hidden_s,
        recompute_s=time.perf_counter() - loaded,
    )
    return Prefilled(reuse, target.extend(plan.token_ids[end:], end, reuse), outcome)


def region_of(plan: ReusePlan) -> Region:
    """A plan's reuse region."""
    return Region(
        token_ids=plan.token_ids,
        chunks=[(chunk.key, chunk.start, chunk.length) for chunk in plan.stored],
        recompute=plan.recompute,
        region_end=plan.region_end,
        end=plan.fill_end,
    )
