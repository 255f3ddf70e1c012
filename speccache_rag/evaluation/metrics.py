"""Quality of an answer against reference answers, each measure in [0, 1]."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def best_f1(answer: str, references: Sequence[str]) -> float:
    """The best F1 over the reference answers, as SQuAD defines it (Rajpurkar et al., arXiv 1606.05250)."""
    return max(f1(answer, reference) for reference in references)


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words both have; two empty answers agree."""
    found, wanted = _words(answer), _words(reference)
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 where the answer's words are those of a reference, as SQuAD defines it."""
    return float(any(_words(answer) == _words(reference) for reference in references))


def contains(answer: str, references: Sequence[str]) -> float:
    """1 where a reference stands in the answer word for word: a needle that was found."""
    found = f" {' '.join(_words(answer))} "
    return float(any(f" {' '.join(_words(reference))} " in found for reference in references))


def best_rouge_l(answer: str, references: Sequence[str]) -> float:
    """The best ROUGE-L F measure over the references (Lin, 2004), with stemming, by the package rouge-score."""
    return max(float(_rouge().score(reference, answer)["rougeL"].fmeasure) for reference in references)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
