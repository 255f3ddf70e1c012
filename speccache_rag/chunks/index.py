"""Find known chunk texts in a rendered prompt.

Frameworks give no dependable channel from retriever to LLM, so the prompt string itself says which chunks it holds.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter, itemgetter

from speccache_rag.types import Chunk, ChunkKey, ChunkMatch

_Bucket = tuple[Chunk, ...]
"""Chunks that share an anchor, sorted by text. Never changed, only replaced."""

_text = attrgetter("text")


class ChunkIndex:
    """Chunk texts by their first `anchor_chars` characters, searched by every thread at once.

    Rules of `find`: matches do not overlap, a chunk may occur many times, the scan goes from left to right, and at
    one place the longest match wins. A chunk whose text was cut is found by its prefix where at least
    `min_prefix_chars` characters of it are there, rounded down to whole tokens: the prefix of a chunk's KV is the KV
    of the prefix. Such a partial match gives way to a longer whole match that begins inside it, and to a whole match
    at the same place unless it is `min_prefix_chars` longer; else the separator behind a chunk would turn it into a
    cut copy of a bigger chunk that goes on with the same separator.

    Chunks shorter than the anchor are known to `get` and never found by `find`: they are too short to be worth it.

    Writers take a lock and replace whole buckets; readers take no lock.
    """

    def __init__(self, anchor_chars: int = 32, min_prefix_chars: int = 64) -> None:
        if not 1 <= anchor_chars <= min_prefix_chars:
            raise ValueError(f"need 1 <= anchor_chars ({anchor_chars}) <= min_prefix_chars ({min_prefix_chars})")
        self._anchor = anchor_chars
        self._min_prefix = min_prefix_chars
        self._longest = 0
        self._by_text: dict[str, Chunk] = {}
        self._by_key: dict[ChunkKey, Chunk] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, chunk: Chunk) -> None:
        """Make a chunk known. Nothing is replaced: a known key, or a known text under another key, stays as it is."""
        with self._lock:
            if self._register(chunk):
                anchor = chunk.text[: self._anchor]
                bucket = self._buckets.get(anchor, ())
                place = bisect_left(bucket, chunk.text, key=_text)
                self._buckets[anchor] = (*bucket[:place], chunk, *bucket[place:])

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """`add` for many chunks; each bucket is replaced once, which matters where thousands share a header."""
        with self._lock:
            new: defaultdict[str, list[Chunk]] = defaultdict(list)
            for chunk in chunks:
                if self._register(chunk):
                    new[chunk.text[: self._anchor]].append(chunk)
            for anchor, added in new.items():
                self._buckets[anchor] = tuple(sorted([*self._buckets.get(anchor, ()), *added], key=_text))

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk; an unknown key is fine."""
        with self._lock:
            chunk = self._by_key.pop(key, None)
            if chunk is None:
                return
            del self._by_text[chunk.text]
            anchor = chunk.text[: self._anchor]
            if rest := tuple(c for c in self._buckets.get(anchor, ()) if c.key != key):
                self._buckets[anchor] = rest
            else:
                self._buckets.pop(anchor, None)

    def get(self, text: str) -> Chunk | None:
        """The chunk with exactly this text, leading and trailing white space aside."""
        return self._by_text.get(text.strip())

    def find(self, prompt: str) -> list[ChunkMatch]:
        """All matches in `prompt`, in prompt order."""
        matches: list[ChunkMatch] = []
        at = 0
        while (match := self._next(prompt, at, len(prompt))) is not None:
            if not match.whole and (longer := self._longer_whole(prompt, match)):
                if head := self._cut(match.chunk, match.char_start, longer.char_start - match.char_start):
                    matches.append(head)
                match = longer
            matches.append(match)
            at = match.char_end
        return matches

    def _register(self, chunk: Chunk) -> bool:
        """Note the chunk; True where it is new and long enough to be found in a prompt."""
        if chunk.key in self._by_key or chunk.text in self._by_text:
            return False
        self._by_key[chunk.key] = self._by_text[chunk.text] = chunk
        self._longest = max(self._longest, len(chunk.text))
        return len(chunk.text) >= self._anchor

    def _next(self, prompt: str, start: int, stop: int) -> ChunkMatch | None:
        """The first match that begins at `start` or later, before `stop`."""
        width, bucket_of = self._anchor, self._buckets.get
        for at in range(start, min(stop, len(prompt) - width + 1)):
            if (bucket := bucket_of(prompt[at : at + width])) and (match := self._best(bucket, prompt, at)):
                return match
        return None

    def _best(self, bucket: _Bucket, prompt: str, at: int) -> ChunkMatch | None:
        """The winning match that starts at `at`.

        The text with the longest common prefix is a neighbour of the prompt's own place in the sorted bucket.
        """
        window = prompt[at : at + self._longest]
        place = bisect_right(bucket, window, key=_text)
        whole = _longest_whole(bucket, window, place)
        neighbours = bucket[max(place - 1, 0) : place + 1]
        shared, chunk = max(((_common_prefix(window, c.text), c) for c in neighbours), key=itemgetter(0))
        partial = self._cut(chunk, at, shared)
        if whole is None or (partial and partial.char_end - at >= len(whole.text) + self._min_prefix):
            return partial
        return ChunkMatch(whole, at, at + len(whole.text), whole.n_tokens)

    def _longer_whole(self, prompt: str, partial: ChunkMatch) -> ChunkMatch | None:
        """The first whole match that begins inside `partial` and is longer than it."""
        at, n_chars = partial.char_start + 1, partial.char_end - partial.char_start
        while (match := self._next(prompt, at, partial.char_end)) is not None:
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


def _longest_whole(bucket: _Bucket, window: str, place: int) -> Chunk | None:
    """The longest chunk whose text is a prefix of `window`; `place` is where `window` sorts in the bucket.

    Every such text sorts before `window` and is a prefix of all that sorts between the two, so what the neighbour
    does not share with `window` can be dropped from the search.
    """
    while place:
        chunk = bucket[place - 1]
        shared = _common_prefix(window, chunk.text)
        if shared == len(chunk.text):
            return chunk
        window = window[:shared]
        place = bisect_right(bucket, window, hi=place - 1, key=_text)
    return None


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
