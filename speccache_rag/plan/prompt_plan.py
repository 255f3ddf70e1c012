"""`PromptPlan`: what will be done to one prompt, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.prompt.chat import Chat
from speccache_rag.types import AssembledPrompt

Prompt = str | Chat | Sequence[Mapping[str, Any]]
"""A prompt as text, or as chat messages with "role" and "content", which may stand in a `Chat`."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The plan of one prompt, made by `SpecCache.plan`. Nothing is generated yet; `SpecCache.generate` takes it."""

    asked: str | Chat
    """The prompt as it was given."""
    reuse: ReusePlan
    """What an engine will do: which chunks are loaded, which positions recomputed."""
    prompt: AssembledPrompt
    """The rendered text, its tokens, and all known chunks in it: those of `reuse.chunks`, in the same order."""
    reasons: tuple[str, ...]
    """Why each of the chunks is loaded, or why not."""
    policy: str
    recompute_ratio: float
    """As asked for; 1 where the policy reuses nothing."""
    effective_ratio: float
    """Chosen tokens by tokens to choose from."""
    scoring: str | None
    """How tokens were scored: "cached" or "online" importance, "attended", "deviation"; None where none were."""
    scores: np.ndarray | None
    """float32 [T], what the policy chose by; NaN where a token has no score."""
    score_s: float
    """Seconds spent on answering the policy's questions."""
    align_s: float
    """Seconds spent on everything else, since the call: matching, tokenization, selection."""
    started: float
    """`time.perf_counter()` at the call."""
