"""From a prompt to an engine request: match, assemble, score, select. One object per request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import Scoring
from speccache_rag.engines.base import EngineRequest, ReuseOutcome
from speccache_rag.errors import ContextOverflow, PromptError
from speccache_rag.plan.scoring_models import MissingKV, ScoringModels
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.alignment import align_scores
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.scoring.questions import Importance, KVDeviation, QueryAttention, Question
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.types import AssembledPrompt, ChunkKey, Placement, PrefillReport, Selection

Prompt = str | Chat | Sequence[Mapping[str, Any]]
"""A prompt as text, or as chat messages with "role" and "content", which may stand in a `Chat`."""


class PromptProbe:
    """Answers a policy's questions about one prompt, and keeps the time that took."""

    def __init__(self, prompt: AssembledPrompt, library: ChunkLibrary, models: ScoringModels, scoring: Scoring) -> None:
        self._prompt = prompt
        self._library = library
        self._models = models
        self._scoring = scoring
        self.scores: np.ndarray | None = None
        """What was answered last, for `explain`; None if nothing was asked."""
        self.scoring: str | None = None
        """How: "online" or "cached" importance, "attended", "deviation"."""
        self.seconds = 0.0

    def answer(self, question: Question) -> np.ndarray:
        """float32 [T] (see scoring/questions.py).

        Where the speculative model lacks KV of some chunk, importance is scored online instead of its attention, and
        `scoring` says so.
        """
        if isinstance(question, Importance):
            return self._importance(question)
        if isinstance(question, KVDeviation):
            deviation = question
            return self._answer("deviation", lambda: self._models.kv_deviation(self._prompt, deviation))
        attention: QueryAttention = question
        try:
            return self._answer("attended", lambda: self._models.query_attention(self._prompt, attention))
        except MissingKV:
            self._scoring = "online"
            return self._importance(Importance(question.layers))

    def _importance(self, question: Importance) -> np.ndarray:
        def score() -> np.ndarray:
            scorer = self._models.scorer(question.layers)
            return self._online(scorer) if self._scoring == "online" else self._cached(scorer)

        return self._answer(self._scoring, score)

    def _answer(self, scoring: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        started = time.perf_counter()
        self.scores = compute()
        self.seconds += time.perf_counter() - started
        self.scoring = scoring
        return self.scores

    def _online(self, scorer: SpeculativeScorer) -> np.ndarray:
        offsets, scores = scorer.score(self._prompt.text)
        return align_scores(offsets, scores, self._prompt.offsets)

    def _cached(self, scorer: SpeculativeScorer) -> np.ndarray:
        scores = np.full(self._prompt.n_tokens, np.nan, dtype=np.float32)
        for placement in self._prompt.placements:
            of_chunk = self._library.scores(placement.chunk, scorer)
            scores[placement.start : placement.end] = of_chunk[: placement.length]
        return scores


@dataclass(slots=True)
class PreparedRequest:
    """A request ready for the engine, and what is known about it so far."""

    request: EngineRequest
    prompt: AssembledPrompt
    """With all matched chunks, those without stored KV too."""
    missing: tuple[Placement, ...]
    """Matched chunks that had no stored KV when the request came."""
    report: PrefillReport
    probe: PromptProbe
    started: float
    """`time.perf_counter()` at submission."""

    def finish_report(self, outcome: ReuseOutcome, ttft_s: float) -> PrefillReport:
        """The report, completed with what the engine did. Its token counts add up to the prompt."""
        report = self.report
        wanted_reuse = self.request.selection is not None or bool(self.missing)
        # Chunk tokens the worker knew nothing of: all of them in plain prefill, the missing ones otherwise.
        plain = self.missing if wanted_reuse else self.prompt.placements
        computed = sum(max(0, p.end - max(p.start, outcome.cached_tokens)) for p in plain)
        report.cached_tokens = outcome.cached_tokens
        report.loaded_tokens = outcome.loaded_tokens
        report.recomputed_tokens = outcome.recomputed_tokens + (0 if wanted_reuse else computed)
        report.missed_tokens = outcome.missed_tokens + (computed if wanted_reuse else 0)
        report.fresh_tokens = report.prompt_tokens - (
            report.cached_tokens + report.loaded_tokens + report.recomputed_tokens + report.missed_tokens
        )
        report.missed_keys = (*(str(p.chunk.key) for p in self.missing), *outcome.missed_keys)
        reused = len(self.request.prompt.placements) if self.request.selection is not None else 0
        report.chunks_reused = reused - len(outcome.missed_keys)
        report.load_s, report.load_hidden_s = outcome.load_s, outcome.load_hidden_s
        report.recompute_s, report.ttft_s = outcome.recompute_s, ttft_s
        parts = report.score_s + report.align_s + report.load_s + report.recompute_s
        report.prefill_s = max(0.0, ttft_s - parts)
        return report


def prepare(
    prompt: Prompt,
    *,
    tokenizer: PromptTokenizer,
    library: ChunkLibrary,
    present: Callable[[Sequence[ChunkKey]], np.ndarray],
    prefetch: Callable[[Sequence[ChunkKey]], None],
    max_model_len: int,
    policy_name: str,
    policy: SelectionPolicy,
    recompute_ratio: float,
    models: ScoringModels,
    scoring: Scoring,
    sampling: Mapping[str, Any],
) -> PreparedRequest:
    """Everything that happens to a prompt before the engine sees it.

    Raises:
        ContextOverflow: the prompt does not fit in the model's context.
        PromptError, ConfigurationError: see their messages.
    """
    started = time.perf_counter()
    text = prompt if isinstance(prompt, str) else tokenizer.render(prompt)
    matches = library.match(text)
    library.escaped.look(text, matches)
    assembled = tokenizer.assemble(text, matches, add_bos=isinstance(prompt, str))
    if not assembled.n_tokens:
        raise PromptError("The prompt is empty.", hint="Pass some text, or at least one message.")
    if assembled.n_tokens >= max_model_len:
        raise ContextOverflow(
            f"The prompt has {assembled.n_tokens} tokens; the model's context is {max_model_len}, one of which the "
            "answer needs."
        )
    usable, missing = _split(assembled, present)
    probe = PromptProbe(usable, library, models, scoring)
    selection: Selection | None = None
    if policy.reuses and usable.placements:
        prefetch([placement.chunk.key for placement in usable.placements])  # read beside scoring
        answers = {question: probe.answer(question) for question in policy.questions_about(usable, recompute_ratio)}
        selection = policy.select(usable, recompute_ratio, answers)
    request = EngineRequest(usable if selection is not None else assembled, selection, sampling)
    report = PrefillReport(
        prompt_tokens=assembled.n_tokens,
        matched_tokens=assembled.n_chunk_tokens,
        chunks_matched=len(assembled.placements),
        policy=policy_name,
        scoring=probe.scoring,
        recompute_ratio=recompute_ratio if policy.reuses else 1.0,
        effective_ratio=selection.effective_ratio if selection is not None else 1.0,
        score_s=probe.seconds,
        align_s=time.perf_counter() - started - probe.seconds,
    )
    return PreparedRequest(request, assembled, missing if policy.reuses else (), report, probe, started)


def _split(
    prompt: AssembledPrompt, present: Callable[[Sequence[ChunkKey]], np.ndarray]
) -> tuple[AssembledPrompt, tuple[Placement, ...]]:
    """The prompt with only the chunks whose KV is in the store, and the others."""
    if not prompt.placements:
        return prompt, ()
    held = present([p.chunk.key for p in prompt.placements])
    usable = tuple(p for p, here in zip(prompt.placements, held, strict=True) if here)
    missing = tuple(p for p, here in zip(prompt.placements, held, strict=True) if not here)
    return replace(prompt, placements=usable), missing
