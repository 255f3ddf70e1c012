"""F1 of an answer, as SQuAD defines it (Rajpurkar et al., arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def best_f1(answer: str, references: Iterable[str]) -> float:
    """The best F1 over the reference answers, in [0, 1]."""
    return max(f1(answer, reference) for reference in references)


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words both have; two empty answers agree."""
    found, wanted = _words(answer), _words(reference)
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
