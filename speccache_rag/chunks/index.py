"""Find known chunk texts in a rendered prompt.

Frameworks give no dependable channel from retriever to LLM, so the prompt string itself says which chunks it holds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import itemgetter

import numpy as np

from speccache_rag.chunks.anchor import anchors_of
from speccache_rag.chunks.catalogue import Catalogue, TextRow
from speccache_rag.store.database import Version
from speccache_rag.types import Chunk, ChunkMatch

SMALL_BUCKET = 16
"""So many texts of one anchor are read at once; of more, the catalogue is asked for the ones that matter."""

_text = itemgetter(1)


class ChunkIndex:
    """The chunks of one namespace of a catalogue, searched by every thread at once.

    Rules of `find`: matches do not overlap, a chunk may occur many times, the scan goes from left to right, and at
    one place the longest match wins. A chunk whose text was cut is found by its prefix where at least
    `min_prefix_chars` characters of it are there, rounded down to whole tokens: the prefix of a chunk's KV is the KV
    of the prefix. Such a partial match gives way to a longer whole match that begins inside it, and to a whole match
    at the same place unless it is `min_prefix_chars` longer; else the separator behind a chunk would turn it into a
    cut copy of a bigger chunk that goes on with the same separator.

    Chunks shorter than an anchor are known to `get` and never found by `find`: they are too short to be worth it.

    Only anchors are held in memory. What other processes add is found by the next `find`.
    """

    def __init__(self, catalogue: Catalogue, namespace_digest: str, min_prefix_chars: int = 64) -> None:
        self._catalogue = catalogue
        self._namespace = namespace_digest
        self._min_prefix = min_prefix_chars
        self._lock = threading.Lock()
        self._anchors = _Anchors()
        self._seen: Version | None = None
        self._last = self._longest = 0
        self._refresh()

    def __len__(self) -> int:
        return self._catalogue.count(self._namespace)

    def add(self, chunk: Chunk) -> None:
        """Make a chunk known. Nothing is replaced: a known key, or a known text under another key, stays as it is."""
        self._catalogue.add(self._namespace, chunk)

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """`add` for many chunks: all of them or, where that fails, none."""
        self._catalogue.add_many(self._namespace, chunks)

    def get(self, text: str) -> Chunk | None:
        """The chunk with exactly this text, leading and trailing white space aside."""
        text = text.strip()
        return self._catalogue.find(self._namespace, text) if _encodable(text) == text else None

    def find(self, prompt: str) -> list[ChunkMatch]:
        """All matches in `prompt`, in prompt order."""
        self._refresh()
        anchors = anchors_of(prompt)
        places = self._anchors.places(anchors)
        if not len(places):
            return []
        return _Search(self._catalogue, self._namespace, prompt, anchors, places, self._longest, self._min_prefix).run()

    def _refresh(self) -> None:
        """Learn the anchors of chunks that were added since the last look."""
        version = self._catalogue.version()
        if version == self._seen:
            return
        with self._lock:
            same_file = self._seen is not None and self._seen[0] == version[0]
            after = self._last if same_file else 0
            anchors, self._last, self._longest = self._catalogue.anchors(self._namespace, after)
            self._anchors = self._anchors.with_more(anchors) if same_file else _Anchors(np.unique(anchors))
            self._seen = version


class _Anchors:
    """A set of anchors: a large sorted array, and a small one in front of it for what is new. Never changed."""

    def __init__(self, old: np.ndarray | None = None, new: np.ndarray | None = None) -> None:
        self._old = np.empty(0, np.int64) if old is None else old
        self._new = np.empty(0, np.int64) if new is None else new

    def with_more(self, anchors: np.ndarray) -> _Anchors:
        new = np.union1d(self._new, anchors)
        if len(new) ** 2 > len(self._old) + 10_000:  # merging costs the whole array, so it is done seldom
            return _Anchors(np.union1d(self._old, new))
        return _Anchors(self._old, new)

    def places(self, anchors: np.ndarray) -> np.ndarray:
        """Where in `anchors` members of the set are, sorted."""
        return np.flatnonzero(_members(self._old, anchors) | _members(self._new, anchors))


def _members(sorted_array: np.ndarray, values: np.ndarray) -> np.ndarray:
    if not len(sorted_array):
        return np.zeros(len(values), dtype=bool)
    at = np.minimum(np.searchsorted(sorted_array, values), len(sorted_array) - 1)
    found: np.ndarray = sorted_array[at] == values
    return found


class _Search:
    """One prompt being searched."""

    def __init__(
        self,
        catalogue: Catalogue,
        namespace_digest: str,
        prompt: str,
        anchors: np.ndarray,
        places: np.ndarray,
        longest: int,
        min_prefix: int,
    ) -> None:
        self._catalogue = catalogue
        self._namespace = namespace_digest
        self._prompt = prompt
        self._anchors = anchors
        self._places: list[int] = places.tolist()
        self._longest = longest
        self._min_prefix = min_prefix
        self._buckets: dict[int, _Bucket] = {}
        self._found: dict[int, ChunkMatch | None] = {}

    def run(self) -> list[ChunkMatch]:
        matches: list[ChunkMatch] = []
        at = 0
        while (match := self._next(at, len(self._prompt))) is not None:
            if not match.whole and (longer := self._longer_whole(match)):
                if head := self._cut(match.chunk, match.char_start, longer.char_start - match.char_start):
                    matches.append(head)
                match = longer
            matches.append(match)
            at = match.char_end
        return matches

    def _next(self, start: int, stop: int) -> ChunkMatch | None:
        """The first match that begins at `start` or later, before `stop`."""
        for at in self._places[bisect_left(self._places, start) : bisect_left(self._places, stop)]:
            if at not in self._found:
                self._found[at] = self._best(at)
            if (match := self._found[at]) is not None:
                return match
        return None

    def _best(self, at: int) -> ChunkMatch | None:
        """The winning match that starts at `at`.

        The text with the longest common prefix is a neighbour of the prompt's own place among the sorted texts.
        """
        bucket = self._bucket(int(self._anchors[at]))
        window = _encodable(self._prompt[at : at + self._longest])
        below, above = bucket.below(window), bucket.above(window)
        neighbours = [(_common_prefix(window, row[1]), row) for row in (below, above) if row is not None]
        if not neighbours:
            return None
        whole = _longest_whole(bucket, window, below)
        least = self._min_prefix + (len(whole[1]) if whole is not None else 0)
        shared, row = max(neighbours, key=itemgetter(0))
        if shared >= least and (chunk := self._catalogue.row(row[0])) is not None:
            partial = self._cut(chunk, at, shared)
            if partial is not None and (whole is None or partial.char_end - at >= least):
                return partial
        if whole is None or (chunk := self._catalogue.row(whole[0])) is None:
            return None
        return ChunkMatch(chunk, at, at + len(chunk.text), chunk.n_tokens)

    def _longer_whole(self, partial: ChunkMatch) -> ChunkMatch | None:
        """The first whole match that begins inside `partial` and is longer than it."""
        at, n_chars = partial.char_start + 1, partial.char_end - partial.char_start
        while (match := self._next(at, partial.char_end)) is not None:
            if match.whole and match.char_end - match.char_start > n_chars:
                return match
            at = match.char_start + 1
        return None

    def _cut(self, chunk: Chunk, at: int, n_chars: int) -> ChunkMatch | None:
        """The whole tokens of `chunk` within its first `n_chars` characters."""
        if n_chars < self._min_prefix:
            return None
        starts, ends = chunk.offsets[:, 0], chunk.offsets[:, 1]
        n_tokens = int(ends.searchsorted(n_chars, side="right"))
        # Tokens that are bytes of one character share its offsets: such a character is kept whole or left out.
        while 0 < n_tokens < chunk.n_tokens and starts[n_tokens] < ends[n_tokens - 1]:
            n_tokens -= 1
        return ChunkMatch(chunk, at, at + int(ends[n_tokens - 1]), n_tokens) if n_tokens else None

    def _bucket(self, anchor: int) -> _Bucket:
        if anchor not in self._buckets:
            self._buckets[anchor] = _Bucket(self._catalogue, self._namespace, anchor)
        return self._buckets[anchor]


class _Bucket:
    """The texts of one anchor, in the order of their characters: here where they are few, else in the catalogue."""

    def __init__(self, catalogue: Catalogue, namespace_digest: str, anchor: int) -> None:
        self._where = namespace_digest, anchor
        self._catalogue = catalogue
        rows = catalogue.texts(namespace_digest, anchor, SMALL_BUCKET + 1)
        self._rows: list[TextRow] | None = rows if len(rows) <= SMALL_BUCKET else None

    def below(self, text: str) -> TextRow | None:
        """The last text that is `text` or comes before it."""
        if self._rows is None:
            return self._catalogue.text_below(*self._where, text)
        place = bisect_right(self._rows, text, key=_text)
        return self._rows[place - 1] if place else None

    def above(self, text: str) -> TextRow | None:
        """The first text that comes behind `text`."""
        if self._rows is None:
            return self._catalogue.text_above(*self._where, text)
        place = bisect_right(self._rows, text, key=_text)
        return self._rows[place] if place < len(self._rows) else None


def _longest_whole(bucket: _Bucket, window: str, below: TextRow | None) -> TextRow | None:
    """The longest text that is a prefix of `window`; `below` is the window's neighbour.

    Every such text sorts before `window` and is a prefix of all that sorts between the two, so what the neighbour
    does not share with `window` can be dropped from the search.
    """
    while below is not None:
        shared = _common_prefix(window, below[1])
        if shared == len(below[1]):
            return below
        window = window[:shared]
        below = bucket.below(window)
    return None


def _encodable(text: str) -> str:
    """The text up to its first lone surrogate, which no chunk holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[: error.start]
    return text


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix; halving keeps the comparing in C."""
    if a.startswith(b):
        return len(b)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if b.startswith(a[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
