from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from speccache_rag.selection.spans import complete, normalise, relative_changes, split_spans

TAU_SMOOTH, TAU_COVER, MAX_SPAN = 0.4, 0.7, 16

importances = hnp.arrays(np.float32, st.integers(0, 80), elements=st.floats(0, 8, width=32))


def spans_of(importance: list[float], chunk_of: list[int] | None = None) -> list[int]:
    chunks = np.array(chunk_of if chunk_of is not None else [0] * len(importance))
    return split_spans(np.array(importance), chunks, TAU_SMOOTH, MAX_SPAN).tolist()


def greedy(importance: np.ndarray, chunk_of: np.ndarray, tau_smooth: float, max_span: int) -> list[int]:
    """The rule of section 2.3 word for word, one token at a time."""
    low, high = float(importance.min()), float(importance.max())
    signal = [(float(v) - low) / (high - low) if high > low else 0.0 for v in importance]
    spans, length = [0], 1
    for i in range(len(signal) - 1):
        if signal[i] == 0:
            delta = float("inf") if signal[i + 1] > 0 else 0.0
        else:
            delta = abs(signal[i + 1] - signal[i]) / signal[i]
        joins = delta < tau_smooth and length < max_span and chunk_of[i] == chunk_of[i + 1]
        spans.append(spans[-1] if joins else spans[-1] + 1)
        length = length + 1 if joins else 1
    return spans


def test_completion_brings_york() -> None:
    """The paper's case: of "New York City" the set holds "New" and "City"; completion brings "York"."""
    tokens = ["the", "of", "New", "York", "City", "Hall", "a", "it"]
    importance = [1.0, 0.8, 9.0, 7.5, 8.6, 8.2, 1.1, 0.0]
    chosen = np.array([token in {"New", "City", "Hall"} for token in tokens])

    span_of = np.array(spans_of(importance))
    completed = complete(chosen, span_of, TAU_COVER)

    assert [t for t, taken in zip(tokens, completed, strict=True) if taken] == ["New", "York", "City", "Hall"]


@pytest.mark.parametrize(("tau_cover", "york"), [(0.7, False), (2 / 3, True), (0.6, True)])
def test_two_of_three_is_below_the_default_cover(tau_cover: float, york: bool) -> None:
    completed = complete(np.array([True, False, True]), np.zeros(3, dtype=int), tau_cover)
    assert completed.tolist() == [True, york, True]


def test_a_share_of_exactly_tau_cover_completes() -> None:
    chosen = np.array([True] * 7 + [False] * 3)
    assert complete(chosen, np.zeros(10, dtype=int), 0.7).all()


def test_completion_leaves_other_spans_alone() -> None:
    chosen = np.array([True, True, True, False, False, False, True])
    span_of = np.array([0, 0, 0, 0, 1, 1, 1])
    assert complete(chosen, span_of, TAU_COVER).tolist() == [True] * 4 + [False, False, True]


def test_a_constant_signal_gives_one_span_per_16() -> None:
    assert spans_of([3.0] * 40) == [0] * 16 + [1] * 16 + [2] * 8


def test_a_smooth_run_is_cut_every_16_from_its_own_start() -> None:
    signal = [0.0] + [5.0] * 20
    assert spans_of(signal) == [0] + [1] * 16 + [2] * 4


def test_a_span_never_crosses_a_chunk_boundary() -> None:
    assert spans_of([2.0] * 6, [0, 0, 1, 1, 1, 2]) == [0, 0, 1, 1, 1, 2]


def test_a_change_of_exactly_tau_smooth_breaks() -> None:
    importance = np.array([0.0, 1.0, 0.5])  # already normalised; the second change is exactly one half
    chunk = np.zeros(3, dtype=int)
    assert split_spans(importance, chunk, 0.5, MAX_SPAN).tolist() == [0, 1, 2]
    assert split_spans(importance, chunk, np.nextafter(0.5, 1), MAX_SPAN).tolist() == [0, 1, 1]


def test_changes_after_zero() -> None:
    changes = relative_changes(np.array([0.0, 0.0, 0.5, 0.25, 0.0]))
    assert changes.tolist() == [0.0, np.inf, 0.5, 1.0]


def test_a_subnormal_value_changes_infinitely_and_without_warning() -> None:
    assert relative_changes(np.array([5e-324, 1.0])).tolist() == [np.inf]


def test_normalise() -> None:
    assert normalise(np.array([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert normalise(np.array([7.0, 7.0])).tolist() == [0.0, 0.0]


def test_no_tokens() -> None:
    empty = np.empty(0)
    assert split_spans(empty, empty.astype(int), TAU_SMOOTH, MAX_SPAN).shape == (0,)
    assert complete(empty.astype(bool), empty.astype(int), TAU_COVER).shape == (0,)


@given(importances.filter(len), st.data(), st.floats(0, 2), st.integers(1, 17))
def test_segmentation_is_the_greedy_rule(
    importance: np.ndarray, data: st.DataObject, tau_smooth: float, max_span: int
) -> None:
    cuts = data.draw(hnp.arrays(np.int64, len(importance), elements=st.integers(0, 1)))
    chunk_of = np.cumsum(cuts)
    spans = split_spans(importance, chunk_of, tau_smooth, max_span)
    assert spans.tolist() == greedy(importance, chunk_of, tau_smooth, max_span)
    assert np.bincount(spans).max() <= max_span


@given(importances.filter(len), st.data())
def test_completion_only_adds_and_is_idempotent(importance: np.ndarray, data: st.DataObject) -> None:
    chosen = data.draw(hnp.arrays(bool, len(importance)))
    span_of = split_spans(importance, np.zeros(len(importance), dtype=int), TAU_SMOOTH, MAX_SPAN)
    completed = complete(chosen, span_of, TAU_COVER)
    assert completed[chosen].all()
    assert (complete(completed, span_of, TAU_COVER) == completed).all()
