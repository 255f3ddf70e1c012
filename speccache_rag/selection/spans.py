"""Spans: runs of smooth importance, completed when most of them is chosen (SpecCache paper, section 2.3).

N is the number of chunk tokens; every array here is over them, in prompt order.
"""

from __future__ import annotations

import numpy as np


def normalise(importance: np.ndarray) -> np.ndarray:
    """Min-max normalised importance, float64 [N] in [0, 1]; a constant signal becomes all 0."""
    signal = importance.astype(np.float64)
    if not signal.size:
        return signal
    low, high = signal.min(), signal.max()
    return (signal - low) / (high - low) if high > low else np.zeros_like(signal)


def relative_changes(signal: np.ndarray) -> np.ndarray:
    """delta_i = |I~_{i+1} - I~_i| / I~_i, float64 [N - 1]; after a zero: 0 if the next is 0 too, else infinite."""
    current, following = signal[:-1], signal[1:]
    after_zero = np.where(following > 0, np.inf, 0.0)
    # A ratio over a subnormal value overflows to infinity, which is the right answer.
    with np.errstate(over="ignore"):
        changes: np.ndarray = np.divide(np.abs(following - current), current, out=after_zero, where=current > 0)
    return changes


def split_spans(importance: np.ndarray, chunk_of: np.ndarray, tau_smooth: float, max_span: int) -> np.ndarray:
    """Cut the chunk tokens into spans; int64 [N], the span of each token, counted from 0.

    From left to right a token joins the span before it while the change is below `tau_smooth`, the span is shorter
    than `max_span` and both are in one chunk. `chunk_of` is int [N], the chunk of each token in the prompt.
    """
    n = len(importance)
    if not n:
        return np.empty(0, dtype=np.int64)
    starts = np.ones(n, dtype=bool)
    starts[1:] = (relative_changes(normalise(importance)) >= tau_smooth) | (chunk_of[1:] != chunk_of[:-1])
    # Greedy growth up to max_span cuts a smooth run every max_span tokens, counted from the start of the run.
    index = np.arange(n)
    run_start = np.maximum.accumulate(np.where(starts, index, 0))
    starts |= (index - run_start) % max_span == 0
    return np.cumsum(starts, dtype=np.int64) - 1


def complete(chosen: np.ndarray, span_of: np.ndarray, tau_cover: float) -> np.ndarray:
    """`chosen` with every span taken whole whose chosen share is at least `tau_cover`; bool [N]."""
    if not len(chosen):
        return chosen
    share = np.bincount(span_of, weights=chosen) / np.bincount(span_of)
    whole: np.ndarray = chosen | (share >= tau_cover)[span_of]
    return whole
