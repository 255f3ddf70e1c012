"""A prompt's prefill: plain, or over stored chunk KV."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from transformers import Cache

from speccache_rag.engines.base import EngineRequest, ReuseOutcome
from speccache_rag.engines.reuse.fill_job import Region, fill_region
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import AssembledPrompt, ChunkKV, Selection


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A prompt's KV, the logits [V] of its last token, and what was reused."""

    cache: Cache
    logits: torch.Tensor
    outcome: ReuseOutcome


def prefill(target: TargetModel, store: ChunkStore, request: EngineRequest) -> Prefilled:
    """Prefill a request's prompt.

    With a selection: load the chunks' KV and recover its positions, recompute selected, fresh and missed tokens of the
    reuse region, then prefill what follows. Without one: plain prefill.
    """
    prompt = request.prompt
    if request.selection is None or not prompt.placements:
        cache, logits = target.prefill(prompt.token_ids)
        return Prefilled(cache, logits, ReuseOutcome())
    region = region_of(prompt, request.selection)
    reuse = ReuseCache(target.shape, region.end)

    def write(kv: ChunkKV, start: int, skip: int, length: int) -> None:
        reuse.write(kv, target.rope, start, skip, length)

    started = time.perf_counter()
    positions, outcome = fill_region(region, store, write)
    target.synchronize()
    loaded = time.perf_counter()
    target.recompute(prompt.token_ids[: region.end], positions, reuse)
    target.synchronize()
    outcome = replace(outcome, load_s=loaded - started, recompute_s=time.perf_counter() - loaded)
    return Prefilled(reuse, target.extend(prompt.token_ids[region.end :], region.end, reuse), outcome)


def region_of(prompt: AssembledPrompt, selection: Selection) -> Region:
    """A prompt's reuse region. The last prompt token is never part of it: its logits begin the answer."""
    return Region(
        token_ids=prompt.token_ids,
        chunks=[(str(p.chunk.key), p.start, p.length) for p in prompt.placements],
        recompute=[(p, p + 1) for p in selection.positions.tolist()],
        region_end=prompt.region_end,
        end=min(prompt.region_end, prompt.n_tokens - 1),
    )
