"""Random plans for tests, made as a prompt is: tokens of chunks and tokens of none, one behind the other."""

from __future__ import annotations

from hypothesis import strategies as st

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan

KEYS = tuple(letter * 64 for letter in "abcd")
STATES = ("stored", "missing", "computed")


@st.composite
def plans(draw: st.DrawFn, states: tuple[str, ...] = STATES, most_chunks: int = 4) -> ReusePlan:
    """A plan of at least one token; the same chunk may stand in it twice, and it may end inside one."""
    n_tokens = draw(st.integers(0, 4))
    chunks: list[PlannedChunk] = []
    chosen: list[int] = []
    for _ in range(draw(st.integers(0, most_chunks))):
        state = draw(st.sampled_from(states))
        chunk = PlannedChunk(
            draw(st.sampled_from(KEYS)), n_tokens, draw(st.integers(1, 12)), state, draw(st.booleans())
        )
        if state == "stored":
            chosen += sorted(draw(st.sets(st.integers(chunk.start, chunk.end - 1))))
        chunks.append(chunk)
        n_tokens = chunk.end + draw(st.integers(0, 3))
    ids = draw(st.permutations(range(100, 100 + max(1, n_tokens))))
    return ReusePlan(tuple(ids), tuple(chunks), ranges(chosen), draw(st.none() | st.integers(0, 3)), "a kind")


def ranges(positions: list[int]) -> tuple[tuple[int, int], ...]:
    """Sorted positions as half-open ranges, the slow way."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return tuple(found)
