"""The report of a served prompt: its plan, completed with what the engine found."""

from __future__ import annotations

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.types import PrefillReport


def report_of(plan: PromptPlan, outcome: ReuseOutcome, ttft_s: float) -> PrefillReport:
    """The report of a prompt that was served as planned; the token counts are the plan's own account.

    Args:
        plan: what was to be done.
        outcome: what the engine says. After a fault nothing of the plan was done.
        ttft_s: seconds from the call to the first token.
    """
    stored = plan.reuse.stored
    unused = outcome.missed_keys if outcome.fault is None else tuple(chunk.key for chunk in stored)
    missing = [chunk.key for chunk in plan.reuse.chunks if chunk.state == "missing"]
    counts = plan.reuse.counts(outcome.cached_tokens, unused)
    parts = plan.score_s + plan.align_s + outcome.load_s + outcome.recompute_s
    return PrefillReport(
        prompt_tokens=plan.prompt.n_tokens,
        matched_tokens=plan.prompt.n_chunk_tokens,
        cached_tokens=counts.cached,
        loaded_tokens=counts.loaded,
        recomputed_tokens=counts.recomputed,
        missed_tokens=counts.missed,
        fresh_tokens=counts.fresh,
        chunks_matched=len(plan.prompt.placements),
        chunks_reused=sum(chunk.key not in unused for chunk in stored),
        missed_keys=tuple(dict.fromkeys((*missing, *outcome.missed_keys))),
        fault=outcome.fault,
        policy=plan.policy,
        scoring=plan.scoring,
        recompute_ratio=plan.recompute_ratio,
        effective_ratio=plan.effective_ratio,
        ttft_s=ttft_s,
        score_s=plan.score_s,
        align_s=plan.align_s,
        load_s=outcome.load_s,
        load_hidden_s=outcome.load_hidden_s,
        recompute_s=outcome.recompute_s,
        prefill_s=max(0.0, ttft_s - parts),
    )
