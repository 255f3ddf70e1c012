"""The anchor of a text: a number made of its first characters, the same in every process.

It says where in a prompt a known chunk may begin: eight bytes for each chunk in memory, instead of its text.
"""

from __future__ import annotations

import numpy as np

ANCHOR_CHARS = 32
"""Characters an anchor is made of; a power of two."""

UNFINDABLE = 0
"""The anchor of texts that are too short to be worth finding."""

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def anchors_of(text: str) -> np.ndarray:
    """int64 [n]: the anchor of the text that begins at each character with enough characters behind it."""
    hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    # A polynomial in the characters, modulo 2**64, doubling the number of characters it covers with each turn.
    width, factor = 1, _FACTOR
    while width < ANCHOR_CHARS:
        if len(hashes) <= width:
            return np.empty(0, np.int64)
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor & _MASK
    # Characters are small numbers, so the highest bits say little until they are mixed.
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_FACTOR)
    hashes ^= hashes >> np.uint64(29)
    hashes[hashes == UNFINDABLE] = 1
    return hashes.view(np.int64)


def anchor_of(text: str) -> int:
    """The anchor of a whole text; UNFINDABLE where it has fewer than ANCHOR_CHARS characters."""
    found = anchors_of(text[:ANCHOR_CHARS])
    return int(found[0]) if len(found) else UNFINDABLE
