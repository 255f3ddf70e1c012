"""Paired differences and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speccache_rag.evaluation.statistics import mean_interval, paired_difference


def test_a_clear_difference_excludes_zero_and_noise_does_not() -> None:
    generator = np.random.default_rng(3)
    base = generator.exponential(0.3, 40)
    clear = paired_difference(base * 0.4, base)
    assert (clear.verdict, clear.n, clear.lower) == ("lower", 40, 40)
    assert clear.mean == pytest.approx(-0.6 * base.mean())
    assert clear.low < clear.mean < clear.high < 0
    assert paired_difference(base, base * 0.4).verdict == "higher"
    noise = paired_difference(base + generator.normal(0, 0.1, 40), base)
    assert noise.verdict == "within noise" and noise.low < 0 < noise.high
    assert noise.needed is not None and clear.needed is not None
    assert noise.needed > 40 > clear.needed


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        low, high = mean_interval(generator.normal(1.0, 2.0, 30).tolist())
        hits += low <= 1.0 <= high
    assert 51 <= hits <= 60


def test_the_same_values_give_the_same_interval() -> None:
    values = [0.1, 0.4, 0.2, 0.9, 0.3]
    assert mean_interval(values) == mean_interval(values)


def test_equal_contestants() -> None:
    same = paired_difference([0.5] * 6, [0.5] * 6)
    assert (same.mean, same.low, same.high, same.equal, same.needed) == (0, 0, 0, 6, None)
    assert same.verdict == "within noise"


def test_very_few_pairs_have_no_interval() -> None:
    few = paired_difference([0.1, 0.2], [0.5, 0.7])
    assert (few.low, few.high) == (-math.inf, math.inf)
    assert few.verdict == "within noise"
    with pytest.raises(ValueError, match="2 and 1 values are no pairs"):
        paired_difference([0.1, 0.2], [0.5])


def test_needed_examples_follow_the_spread() -> None:
    gaps = [-0.1, 0.3, -0.2, 0.4, -0.3, 0.2, 0.1, -0.1]
    found = paired_difference(gaps, [0.0] * 8)
    expected = math.ceil((1.959964 * np.std(gaps, ddof=1) / np.mean(gaps)) ** 2)
    assert found.needed == expected
