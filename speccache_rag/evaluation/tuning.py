"""Tuning: the cheapest contestant whose answers stay as close to full recompute as the user wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from speccache_rag.evaluation.records import FULL, Record
from speccache_rag.evaluation.results import Results
from speccache_rag.evaluation.statistics import mean_interval

Goal = Literal["agreement", "kl", "f1"]
"""What must stay within a bound: the share of answer tokens full recompute agrees with, KL in nats, or F1 lost."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A contestant, what it costs, and how close it is."""

    label: str
    record: Record
    """One of its records, which names policy, ratio and scorer."""
    n: int
    cost: float
    """Computed tokens, scoring included, as a share of the prompt."""
    value: float
    low: float
    high: float
    """Ends of the 95 % interval of the value's mean."""
    fits: bool
    """The whole interval is within the bound."""


def candidates(results: Results, goal: Goal, bound: float) -> list[Candidate]:
    """Every contestant, cheapest first.

    Args:
        results: of one target, with full recompute among them.
        goal: what is bounded.
        bound: the least agreement, the most KL, or the most F1 that may be lost.
    """
    full = results.values(FULL, lambda record: record.f1)

    def value(record: Record) -> float | None:
        if goal == "agreement":
            return record.agreement
        if goal == "kl":
            return record.kl
        reference = full.get((record.dataset, record.example))
        return None if record.f1 is None or reference is None else reference - record.f1

    found = [_candidate(label, results, value, goal, bound) for label in results.by_label]
    return sorted((one for one in found if one is not None), key=lambda one: one.cost)


def cheapest(found: Sequence[Candidate]) -> Candidate | None:
    """The first that fits; None where nothing does."""
    return next((one for one in found if one.fits), None)


def _candidate(
    label: str, results: Results, value: Callable[[Record], float | None], goal: Goal, bound: float
) -> Candidate | None:
    records = list(results.by_label[label].values())
    values = list(results.values(label, value).values())
    if not values:
        return None
    low, high = mean_interval(values)
    return Candidate(
        label=label,
        record=records[0],
        n=len(values),
        cost=float(np.mean([record.computed_tokens / record.prompt_tokens for record in records])),
        value=float(np.mean(values)),
        low=low,
        high=high,
        fits=low >= bound if goal == "agreement" else high <= bound,
    )
