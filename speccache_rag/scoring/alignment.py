"""Carry importance scores from the speculative model's tokens to the target model's (paper section 2.4)."""

from __future__ import annotations

import numpy as np

from speccache_rag.types import Offsets


def align_scores(source_offsets: Offsets, scores: np.ndarray, target_offsets: Offsets) -> np.ndarray:
    """The highest score among the source tokens that share a character with each target token.

    A maximum, because then selecting commutes with aligning: for every t > 0 the target tokens whose aligned score is
    at least t are exactly those that overlap a source token whose score is at least t, the paper's Psi.

    Args:
        source_offsets: int32 [S, 2], characters of the same text as `target_offsets`.
        scores: float [S]; NaN means no score.
        target_offsets: int32 [T, 2].

    Returns:
        float32 [T]; 0.0 for a token that overlaps no scored source token (such as BOS, whose range is empty).

    Raises:
        ValueError: there is not one score for each source token.
    """
    if scores.shape != (len(source_offsets),):
        raise ValueError(f"scores have shape {scores.shape}; {len(source_offsets)} source tokens need that many")
    n_chars = max((int(o[:, 1].max()) for o in (source_offsets, target_offsets) if len(o)), default=0)
    best = np.full(n_chars, np.nan, dtype=np.float32)
    owners, chars = _characters(source_offsets)
    np.fmax.at(best, chars, scores.astype(np.float32)[owners])

    aligned = np.zeros(len(target_offsets), dtype=np.float32)
    owners, chars = _characters(target_offsets)
    if len(owners):
        tokens, firsts = np.unique(owners, return_index=True)
        aligned[tokens] = np.nan_to_num(np.fmax.reduceat(best[chars], firsts), nan=0.0, posinf=np.inf, neginf=-np.inf)
    return aligned


def _characters(offsets: Offsets) -> tuple[np.ndarray, np.ndarray]:
    """Every (token, character) pair, in token order: two int64 arrays of equal length."""
    starts = offsets[:, 0].astype(np.int64)
    lengths = np.maximum(offsets[:, 1] - starts, 0)
    owners = np.repeat(np.arange(len(offsets)), lengths)
    first_pair = np.cumsum(lengths) - lengths
    return owners, np.arange(len(owners)) - first_pair[owners] + starts[owners]
