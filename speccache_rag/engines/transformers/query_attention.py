"""The answer to `QueryAttention`: what the query attends to, over reused chunk KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from speccache_rag.engines.reuse.fill import FillJob
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.header import Header
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.scoring.layers import counted_layers
from speccache_rag.scoring.questions import QueryAttention
from speccache_rag.store.base import ChunkStore


def query_attention(
    target: TargetModel, store: ChunkStore, plan: ReusePlan, question: QueryAttention, header: Header
) -> np.ndarray:
    """float32 [T]. Reuses the stored chunks and computes the rest in one pass, whose last rows are the query.

    `header` saves computing again what the prompts of a pipeline begin with.
    """
    n = len(plan.token_ids)
    cache = ReuseCache(target.shape, n)
    header_ids = plan.token_ids[: plan.stored[0].start if plan.stored else 0]
    known = header.write(cache, target.rope, header_ids)
    job = FillJob(replace(plan, recompute=()), store, target.shape, known)
    job.decide(job.load())
    job.write(lambda stretches: cache.write(stretches, target.rope))
    rows = np.concatenate((job.positions, np.arange(plan.fill_end, n)))
    layers = counted_layers(target.shape.n_layers, question.layers)
    attention = target.attend(plan.token_ids, rows, cache, plan.fill_end, layers)
    header.keep(cache, header_ids)
    found: np.ndarray = attention.mean(dim=0).cpu().numpy()
    return found
