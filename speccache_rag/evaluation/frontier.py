"""The frontier of quality against cost, and comparisons of contestants at the same cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from speccache_rag.evaluation.records import FULL
from speccache_rag.evaluation.results import REUSE, Case, Results, kl_of, paired
from speccache_rag.evaluation.statistics import Difference, mean_interval

Costs = Mapping[str, float]
"""Cost of a contestant with its ratio, as a share of full recompute's."""


@dataclass(frozen=True, slots=True)
class Point:
    """One contestant at one ratio on the frontier."""

    label: str
    cost: float
    mean: float
    low: float
    high: float
    """Ends of the 95 % interval of the mean."""
    median: float


def token_costs(results: Results) -> dict[str, float]:
    """Computed tokens, scoring included, as a share of the prompt's: what can be known without a clock."""
    return {row.label: row.computed for row in results.rows()}


def points(results: Results, family: str, costs: Costs) -> list[Point]:
    """A contestant's points by rising cost; those without a known cost are left out."""
    found = []
    for label in results.families[family]:
        values = list(results.values(label, kl_of).values())
        if label in costs and values:
            low, high = mean_interval(values)
            mean, median = float(np.mean(values)), float(np.median(values))
            found.append(Point(label, costs[label], mean, low, high, median))
    return sorted(found, key=lambda point: point.cost)


def at_cost(results: Results, family: str, cost: float, costs: Costs) -> dict[Case, float]:
    """KL of a contestant on every example, read between its ratios at a cost.

    Straight lines join the measured costs on each example; recomputing nothing and recomputing everything are the two
    ends of each contestant. Only examples with all the points count.
    """
    labels = [
        label for label in (REUSE, *results.families[family], FULL) if label in costs and label in results.by_label
    ]
    labels.sort(key=lambda label: costs[label])
    if not labels or not costs[labels[0]] <= cost <= costs[labels[-1]]:
        return {}
    known = [results.values(label, kl_of) for label in labels]
    cases = set(known[0]).intersection(*known[1:])
    at = [costs[label] for label in labels]
    return {case: float(np.interp(cost, at, [values[case] for values in known])) for case in sorted(cases)}


def at_equal_cost(results: Results, label: str, family: str, costs: Costs) -> Difference | None:
    """KL of one contestant less that of another at the cost of the first; None where it cannot be read off."""
    if label not in costs:
        return None
    return paired(results.values(label, kl_of), at_cost(results, family, costs[label], costs))
