"""`Draft`: a plan in the making, whose policy waits for answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.reuse.plan import ReusePlan, runs
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.prompt.chat import Chat
from speccache_rag.scoring.questions import Question
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.types import AssembledPrompt


@dataclass(slots=True, eq=False)
class Draft:
    """Everything about a prompt but the positions to recompute."""

    asked: str | Chat
    prompt: AssembledPrompt
    """With all known chunks in it."""
    reuse: ReusePlan
    """Without positions to recompute."""
    reasons: tuple[str, ...]
    config: SpecCacheConfig
    """The configuration, with the options of this call in it."""
    policy: SelectionPolicy
    started: float
    answers: dict[Question, np.ndarray] = field(default_factory=dict)
    scores: np.ndarray | None = None
    scoring: str | None = None
    score_s: float = 0.0

    @property
    def choosable(self) -> AssembledPrompt:
        """The prompt with the placements to choose from: those that are loaded and approximate."""
        chunks = zip(self.reuse.chunks, self.prompt.placements, strict=True)
        placements = tuple(place for chunk, place in chunks if chunk.state == "stored" and not chunk.exact)
        return replace(self.prompt, placements=placements)

    @property
    def unanswered(self) -> list[Question]:
        """What the policy still has to know."""
        asked = self.policy.questions_about(self.choosable, self.config.recompute_ratio) if self.policy.reuses else ()
        return [question for question in asked if question not in self.answers]

    def take(self, question: Question, answer: np.ndarray, scoring: str, seconds: float) -> None:
        """Note an answer, how it was found, and the time that took."""
        self.answers[question] = self.scores = answer
        self.scoring = scoring
        self.score_s += seconds

    def finish(self) -> PromptPlan:
        """Let the policy choose.

        Raises:
            ConfigurationError: the policy chose something else than chunk tokens.
        """
        reuse, ratio, effective = self.reuse, 1.0, 1.0
        if self.policy.reuses:
            ratio = self.config.recompute_ratio
        if reuse.stored:
            selection = self.policy.select(self.choosable, ratio, self.answers)
            reuse = replace(reuse, recompute=tuple(runs(selection.positions)))
            effective = selection.effective_ratio
        return PromptPlan(
            asked=self.asked,
            reuse=reuse,
            prompt=self.prompt,
            reasons=self.reasons,
            policy=self.config.policy,
            recompute_ratio=ratio,
            effective_ratio=effective,
            scoring=self.scoring,
            scores=self.scores,
            score_s=self.score_s,
            align_s=time.perf_counter() - self.started - self.score_s,
            started=self.started,
        )
