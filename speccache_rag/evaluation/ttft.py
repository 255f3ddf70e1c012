"""Time to first token: contestants take turns on one idle engine, prompt by prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from speccache_rag.evaluation.contestants import Contestant
from speccache_rag.evaluation.records import FULL
from speccache_rag.runtime import SpecCache
from speccache_rag.types import PrefillReport

PREFIX_CACHE = "prefix cache alone"
"""The baseline without this package: what an engine remembers of the beginning of earlier prompts."""


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One contestant; medians over prompts and rounds."""

    label: str
    n: int
    prompt_tokens: float
    computed_tokens: float
    """Tokens that were neither loaded nor found in the prefix cache; scoring is not in here but in the seconds."""
    ttft_median_s: float
    ttft_low_s: float
    ttft_high_s: float
    """Quartiles."""
    score_median_s: float
    speedup: float
    """Full recompute's median by this one's."""
    of_limit: float
    """The speedup as a share of prompt tokens by computed tokens, which it would be if nothing else took time."""


class Stopwatch:
    """Times of a run, contestant by contestant.

    Args:
        sc: the runtime; its engine serves nothing else meanwhile.
        contestants: who takes turns; full recompute is added where it is not among them.
    """

    def __init__(self, sc: SpecCache, contestants: Sequence[Contestant]) -> None:
        self._sc = sc
        self._contestants = [Contestant(FULL, 1.0), *(one for one in contestants if one.policy != FULL)]
        self._seconds: dict[str, list[float]] = {}
        self._reports: dict[str, list[PrefillReport]] = {}

    @property
    def labels(self) -> list[str]:
        """Names in tables, in the order of turns."""
        return [label(one) for one in self._contestants]

    def rehearse(self, prompt: list[dict[str, str]]) -> None:
        """Go through every path once, so that no timed turn pays for first use."""
        for one in self._contestants:
            self._ask(prompt, one)

    def round(self, prompts: Sequence[list[dict[str, str]]], advance: Callable[[], None]) -> None:
        """One turn of every contestant on every prompt, each from an empty prefix cache."""
        for number, prompt in enumerate(prompts):
            turns = (
                self._contestants[number % len(self._contestants) :]
                + self._contestants[: number % len(self._contestants)]
            )
            for one in turns:
                self._sc.reset_prefix_cache()
                self._note(label(one), *self._ask(prompt, one))
                advance()

    def prefix_cache(
        self, prompts: Sequence[list[dict[str, str]]], orders: Sequence[str], advance: Callable[[], None]
    ) -> None:
        """The baseline: full recompute after full recompute, without forgetting; `orders` tell how prompts follow."""
        self._sc.reset_prefix_cache()
        full = Contestant(FULL, 1.0)
        for prompt, order in zip(prompts, orders, strict=True):
            seconds, report = self._ask(prompt, full)
            if order:
                self._note(f"{PREFIX_CACHE}, {order}", seconds, report)
            advance()

    def rows(self) -> list[TtftRow]:
        """What came of it, in the order of turns."""
        full = float(np.median(self._seconds[FULL]))
        return [self._row(name, full) for name in self._seconds]

    def _row(self, name: str, full_s: float) -> TtftRow:
        seconds, reports = self._seconds[name], self._reports[name]
        low, median, high = (float(q) for q in np.quantile(seconds, (0.25, 0.5, 0.75)))
        prompt = float(np.mean([r.prompt_tokens for r in reports]))
        computed = float(np.mean([r.prompt_tokens - r.loaded_tokens - r.cached_tokens for r in reports]))
        return TtftRow(
            label=name,
            n=len(seconds),
            prompt_tokens=prompt,
            computed_tokens=computed,
            ttft_median_s=median,
            ttft_low_s=low,
            ttft_high_s=high,
            score_median_s=float(np.median([r.score_s for r in reports])),
            speedup=full_s / median,
            of_limit=full_s / median * computed / prompt,
        )

    def _ask(self, prompt: list[dict[str, str]], one: Contestant) -> tuple[float, PrefillReport]:
        started = time.perf_counter()
        done = self._sc.generate(
            prompt, policy=one.policy, recompute_ratio=one.recompute_ratio, max_tokens=1, temperature=0.0
        )
        # The first token is the last one here, so the whole call is timed, what the package adds included.
        return time.perf_counter() - started, done.report

    def _note(self, name: str, seconds: float, report: PrefillReport) -> None:
        self._seconds.setdefault(name, []).append(seconds)
        self._reports.setdefault(name, []).append(report)


def label(one: Contestant) -> str:
    """A contestant with its ratio, as `Record.label` has it."""
    whole = one.policy in (FULL, "full_reuse")
    return one.policy if whole else f"{one.name}@{one.recompute_ratio:g}"


def shuffled(prompts: Sequence[Sequence[str]], seed: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Chunks for the prefix-cache baseline: each prompt new, then repeated, then in another order."""
    chance = random.Random(seed)
    for chunks in prompts:
        other = list(chunks)
        while len(other) > 1 and other[0] == chunks[0]:
            chance.shuffle(other)
        yield "", list(chunks)
        yield "same order", list(chunks)
        yield "another order", other


def to_json(rows: Sequence[TtftRow], facts: dict[str, Any]) -> dict[str, Any]:
    """What `speccache report` reads as ttft.json."""
    return {**facts, "rows": [asdict(row) for row in rows]}
