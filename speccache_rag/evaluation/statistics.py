"""Paired comparisons of two contestants on the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST = 4
"""Fewer pairs have no interval worth the name."""

Verdict = Literal["lower", "higher", "within noise"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of a measure's differences, first contestant less second, over the examples that both have."""

    n: int
    mean: float
    low: float
    high: float
    """Ends of the 95 % bootstrap interval of the mean (BCa; Efron, 1987)."""
    median: float
    lower: int
    """Examples where the first is below the second."""
    equal: int
    needed: int | None
    """Examples that would decide it, if mean and spread stayed what they are; None where both are always equal."""

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        if self.high < 0:
            return "lower"
        return "higher" if self.low > 0 else "within noise"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two contestants, example by example; the bootstrap draws examples, and is the same each time.

    Raises:
        ValueError: there is not one value of each for every example, or none at all.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{len(first)} and {len(second)} values are no pairs")
    gaps = np.subtract(first, second, dtype=np.float64)
    low, high = _interval(gaps)
    mean = float(gaps.mean())
    return Difference(
        n=len(gaps),
        mean=mean,
        low=low,
        high=high,
        median=float(np.median(gaps)),
        lower=int((gaps < 0).sum()),
        equal=int((gaps == 0).sum()),
        needed=_needed(gaps, mean),
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean."""
    return _interval(np.asarray(values, dtype=np.float64))


def _interval(values: np.ndarray) -> tuple[float, float]:
    if len(values) < FEWEST:
        return -math.inf, math.inf
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, rng=np.random.default_rng(0)
    ).confidence_interval
    if math.isnan(found.low) or math.isnan(found.high):  # BCa has no answer for a few very skewed samples
        found = bootstrap(
            (values,), np.mean, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
    return float(found.low), float(found.high)


def _needed(gaps: np.ndarray, mean: float) -> int | None:
    """The n at which a normal 95 % interval of this mean and spread excludes zero."""
    if np.ptp(gaps) == 0 or mean == 0 or len(gaps) < 2:
        return None
    from scipy.stats import norm

    z = float(norm.ppf((1 + CONFIDENCE) / 2))
    return math.ceil((z * float(gaps.std(ddof=1)) / mean) ** 2)
