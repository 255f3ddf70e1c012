"""What would be done with a prompt, token by token."""

from __future__ import annotations

import numpy as np

from speccache_rag.engines.base import ReuseOutcome
from speccache_rag.plan.planner import PreparedRequest
from speccache_rag.types import Explanation, TokenExplanation


def explain_request(prepared: PreparedRequest) -> Explanation:
    """The table for a prepared request, and the report it would get from an idle engine (no seconds)."""
    prompt, selection = prepared.prompt, prepared.request.selection
    action = np.full(prompt.n_tokens, "fresh", dtype=object)
    chunk_of = np.full(prompt.n_tokens, -1, dtype=np.int64)
    for index, placement in enumerate(prompt.placements):
        here = slice(placement.start, placement.end)
        chunk_of[here] = index
        if placement in prepared.missing:
            action[here] = "missed"
        else:
            action[here] = "recomputed" if selection is None else "loaded"
    if selection is not None:
        action[selection.positions] = "recomputed"
    scores = prepared.probe.scores
    if scores is None:
        scores = np.full(prompt.n_tokens, np.nan)
    tokens = tuple(
        TokenExplanation(
            position=i,
            token_id=token_id,
            text=prompt.text[prompt.offsets[i, 0] : prompt.offsets[i, 1]],
            chunk=int(chunk_of[i]) if chunk_of[i] >= 0 else None,
            action=str(action[i]),
            score=None if np.isnan(scores[i]) else float(scores[i]),
        )
        for i, token_id in enumerate(prompt.token_ids)
    )
    outcome = ReuseOutcome(
        loaded_tokens=int((action == "loaded").sum()),
        recomputed_tokens=int((action == "recomputed").sum()) if selection is not None else 0,
    )
    return Explanation(tokens, prepared.finish_report(outcome, ttft_s=0.0))
