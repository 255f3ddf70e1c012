"""A prompt's prefill: plain, or over stored chunk KV."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from transformers import Cache

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.engines.reuse.fill import FillJob
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.store.base import ChunkStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt's KV, the logits [V] of its last token, and what was reused."""

    cache: Cache
    logits: torch.Tensor
    outcome: ReuseOutcome


def prefill(target: TargetModel, store: ChunkStore, plan: ReusePlan) -> Prefilled:
    """Prefill a prompt as planned.

    With stored chunks: load their KV and recover its positions, compute the other tokens of the reuse region, then
    prefill what follows. Without, or where that fails: plain prefill.
    """
    if plan.stored:
        try:
            return _prefill_over_chunks(target, store, plan)
        except Exception as error:  # whatever it is, the prompt can be computed; the report says what happened
            logger.exception("a prompt is prefilled without reuse")
            outcome = ReuseOutcome(fault=repr(error))
    else:
        outcome = ReuseOutcome()
    cache, logits = target.prefill(plan.token_ids)
    return Prefilled(cache, logits, outcome)


def _prefill_over_chunks(target: TargetModel, store: ChunkStore, plan: ReusePlan) -> Prefilled:
    job = FillJob(plan, store, target.shape)
    reuse = ReuseCache(target.shape, plan.fill_end)
    missed = job.load()
    job.decide(missed)
    job.write(lambda stretches: reuse.write(stretches, target.rope))
    target.synchronize()
    started = time.perf_counter()
    target.recompute(plan.token_ids[: plan.fill_end], job.positions, reuse)
    target.synchronize()
    outcome = ReuseOutcome(
        missed_keys=tuple(sorted(missed)),
        load_s=job.load_s,
        load_hidden_s=job.load_hidden_s,
        recompute_s=time.perf_counter() - started,
    )
    return Prefilled(reuse, target.extend(plan.token_ids[plan.fill_end :], plan.fill_end, reuse), outcome)
