"""The table of `SpecCache.explain`: what would be done with a prompt, token by token."""

from __future__ import annotations

import numpy as np

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.plan.report import report_of
from speccache_rag.types import Explanation, TokenExplanation


def explanation_of(plan: PromptPlan) -> Explanation:
    """The table of a plan, and the report it would get from an idle engine (no seconds)."""
    prompt, actions = plan.prompt, plan.reuse.actions()
    chunk_of = np.full(prompt.n_tokens, -1)
    for index, placement in enumerate(prompt.placements):
        chunk_of[placement.start : placement.end] = index
    scores = plan.scores if plan.scores is not None else np.full(prompt.n_tokens, np.nan)
    tokens = tuple(
        TokenExplanation(
            position=i,
            token_id=token_id,
            text=prompt.text[prompt.offsets[i, 0] : prompt.offsets[i, 1]],
            chunk=int(chunk_of[i]) if chunk_of[i] >= 0 else None,
            action=str(actions[i]),
            score=None if np.isnan(scores[i]) else float(scores[i]),
        )
        for i, token_id in enumerate(prompt.token_ids)
    )
    return Explanation(tokens, report_of(plan, ReuseOutcome(), ttft_s=0.0))
