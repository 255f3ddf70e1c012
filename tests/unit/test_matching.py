from __future__ import annotations

import random
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.chunks import anchor
from speccache_rag.chunks import index as matching
from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.index import ChunkIndex
from speccache_rag.types import Chunk, ChunkKey, ChunkMatch

FOX = "The quick brown fox jumps over the lazy dog, then rests in the shade of an old oak tree until the evening comes."
OWL = "An owl watched all of it from the oak, and at dusk flew off over the fields to look for mice near the old barn."


def make_chunk(text: str, *, key: str | None = None, width: int = 1) -> Chunk:
    """Tokens of `width` characters each."""
    starts = np.arange(0, len(text), width)
    offsets = np.stack([starts, np.minimum(starts + width, len(text))], axis=1).astype(np.int32)
    return Chunk(ChunkKey(key or text), text, tuple(range(len(starts))), offsets)


def new_index(min_prefix_chars: int = 64) -> ChunkIndex:
    return ChunkIndex(Catalogue(), "ours", min_prefix_chars)


def forget(index: ChunkIndex, key: str) -> None:
    index._catalogue.forget([ChunkKey(key)])


def make_index(*texts: str, width: int = 1) -> ChunkIndex:
    index = new_index()
    for text in texts:
        index.add(make_chunk(text, width=width))
    return index


def found(index: ChunkIndex, prompt: str) -> list[tuple[str, str, bool]]:
    """(chunk text, matched text, whole) of every match; what every match must keep is asserted on the way."""
    matches = index.find(prompt)
    for match in matches:
        matched = prompt[match.char_start : match.char_end]
        assert matched == match.chunk.text[: len(matched)]
        assert match.chunk.offsets[match.n_tokens - 1, 1] == len(matched)
        assert match.whole == (matched == match.chunk.text)
    assert all(match.char_end <= following.char_start for match, following in pairwise(matches))
    return [(m.chunk.text, prompt[m.char_start : m.char_end], m.whole) for m in matches]


def test_chunks_in_any_order_and_repeated() -> None:
    index = make_index(FOX, OWL)
    assert found(index, f"<system>\n{OWL}\n\n{FOX}{FOX}\nWho?") == [(t, t, True) for t in (OWL, FOX, FOX)]


@pytest.mark.parametrize("prompt", ["", "Who?", FOX[:31], FOX[1:], OWL])
def test_nothing_to_find(prompt: str) -> None:
    assert found(make_index(FOX), prompt) == []


def test_an_empty_index_finds_nothing() -> None:
    assert new_index().find(FOX) == []


def test_the_longest_whole_match_wins() -> None:
    parent = f"{FOX}\n\n{OWL}"
    assert found(make_index(FOX, parent, FOX[:40]), f"a {parent} b") == [(parent, parent, True)]
    assert found(make_index(FOX, parent, FOX[:40]), f"a {FOX}\n\nb") == [(FOX, FOX, True)]
    assert found(make_index(FOX, parent, FOX[:40]), f"a {FOX[:50]}") == [(FOX[:40], FOX[:40], True)]


def test_a_whole_match_hidden_between_longer_neighbours_is_found() -> None:
    # In sorted order the longer text lies between the whole match and the prompt.
    assert found(make_index(FOX, FOX + "aaa", FOX + "abz"), FOX + "aczz") == [(FOX, FOX, True)]


def test_a_cut_chunk_is_rounded_down_to_a_token() -> None:
    index = make_index(FOX, width=7)
    assert found(index, FOX[:75] + " ...") == [(FOX, FOX[:70], False)]
    assert found(index, FOX[:77]) == [(FOX, FOX[:77], False)]


@pytest.mark.parametrize(("n_chars", "matched"), [(32, 0), (63, 0), (64, 64), (65, 65)])
def test_a_cut_chunk_needs_64_characters(n_chars: int, matched: int) -> None:
    expected = [(FOX, FOX[:matched], False)] if matched else []
    assert found(make_index(FOX), FOX[:n_chars] + "#") == expected


def test_a_cut_never_splits_a_character() -> None:
    text = "x" * 70 + "👩" + "y" * 40
    offsets = [(i, i + 1) for i in range(70)] + [(70, 71)] * 4 + [(i, i + 1) for i in range(71, 111)]
    chunk = Chunk(ChunkKey("k"), text, tuple(range(len(offsets))), np.array(offsets, np.int32))
    index = new_index()
    index.add(chunk)
    assert [(m.char_end, m.n_tokens) for m in index.find(text[:70] + "!")] == [(70, 70)]
    assert [(m.char_end, m.n_tokens) for m in index.find(text[:71] + "!")] == [(71, 74)]


def test_a_cut_inside_a_token_that_begins_in_the_last_character_drops_both() -> None:
    # " 👩" may come as a token for the space and the first bytes, then one for the rest: (69, 71), (70, 71).
    text = "x" * 69 + " 👩" + "y" * 40
    offsets = [(i, i + 1) for i in range(69)] + [(69, 71), (70, 72)] + [(i, i + 1) for i in range(72, 111)]
    index = new_index()
    index.add(Chunk(ChunkKey("k"), text, tuple(range(len(offsets))), np.array(offsets, np.int32)))
    assert [(m.char_end, m.n_tokens) for m in index.find(text[:71] + "!")] == [(69, 69)]


def test_a_long_cut_beats_a_short_whole_match() -> None:
    parent = FOX[:40] + OWL
    assert found(make_index(FOX[:40], parent), parent[:-1]) == [(parent, parent[:-1], False)]


def test_a_longer_whole_match_inside_a_partial_one_wins() -> None:
    parent = FOX + " " + OWL[:60] + " and so on, somewhere else"
    index = make_index(parent, OWL)
    assert found(index, f"{FOX} {OWL}") == [(parent, f"{FOX} {OWL[:60]}", False)]  # the partial one is longer
    long_owl = OWL * 3
    index.add(make_chunk(long_owl))
    assert found(index, f"{FOX} {long_owl}") == [(parent, f"{FOX} ", False), (long_owl, long_owl, True)]


def test_chunks_shorter_than_the_anchor_are_known_but_not_found() -> None:
    index = make_index(FOX[:30])
    assert index.get(FOX[:30]) is not None
    assert found(index, FOX) == []
    forget(index, FOX[:30])
    assert len(index) == 0


def test_get_is_by_stripped_text() -> None:
    index = make_index(FOX)
    chunk = index.get(f"\n {FOX}\t\n")
    assert chunk is not None
    assert chunk.text == FOX
    assert index.get(FOX[:-1]) is None


def test_add_replaces_nothing() -> None:
    index, first = new_index(), make_chunk(FOX, key="a")
    index.add(first)
    index.add(make_chunk(OWL, key="a"))
    index.add(make_chunk(FOX, key="b"))
    assert len(index) == 1
    assert index.get(OWL) is None
    assert [m.chunk.key for m in index.find(FOX + OWL)] == [first.key]


def test_discard() -> None:
    index = make_index(FOX, OWL, FOX + "!")
    forget(index, FOX)
    forget(index, "unknown")
    assert index.get(FOX) is None
    assert found(index, OWL + FOX + "!") == [(OWL, OWL, True), (FOX + "!", FOX + "!", True)]
    forget(index, FOX + "!")
    forget(index, OWL)
    assert found(index, OWL + FOX + "!") == []
    assert len(index) == 0


ANCHOR, PREFIX = 2, 4
texts = st.text("ab", min_size=1, max_size=9)


def slow_best(chunks: list[Chunk], prompt: str, at: int) -> tuple[int, bool] | None:
    """(characters, whole) of the winner at `at`, by trying every chunk. One-character tokens."""
    reachable = [c.text for c in chunks if len(c.text) >= ANCHOR and prompt[at:].startswith(c.text[:ANCHOR])]
    whole = max((len(t) for t in reachable if prompt.startswith(t, at)), default=0)
    shared = max((len_shared(prompt[at:], t) for t in reachable), default=0)
    if shared >= PREFIX and (not whole or shared >= whole + PREFIX):
        return shared, False
    return (whole, True) if whole else None


def len_shared(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def slow_find(chunks: list[Chunk], prompt: str) -> list[tuple[int, int, bool]]:
    """The rules of `ChunkIndex.find`, said the slow and obvious way: (start, end, whole)."""
    found, at = [], 0
    while at < len(prompt):
        best = slow_best(chunks, prompt, at)
        if best is None:
            at += 1
            continue
        n_chars, whole = best
        if not whole:
            for later in range(at + 1, at + n_chars):
                longer = slow_best(chunks, prompt, later)
                if longer and longer[1] and longer[0] > n_chars:
                    if later - at >= PREFIX:
                        found.append((at, later, False))
                    at, (n_chars, whole) = later, longer
                    break
        found.append((at, at + n_chars, whole))
        at += n_chars
    return found


def spans(matches: list[ChunkMatch]) -> list[tuple[int, int, bool]]:
    return [(m.char_start, m.char_end, m.whole) for m in matches]


@settings(max_examples=400, deadline=None)
@given(st.lists(texts, max_size=12, unique=True), st.text("ab", max_size=40), st.data())
def test_find_equals_the_slow_search(known: list[str], prompt: str, data: st.DataObject) -> None:
    chunks = [make_chunk(text) for text in known]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchor, "ANCHOR_CHARS", ANCHOR)
        patch.setattr(matching, "SMALL_BUCKET", data.draw(st.sampled_from([0, 1, 16])))
        one_by_one, at_once = new_index(PREFIX), new_index(PREFIX)
        for chunk in chunks:
            one_by_one.add(chunk)
        at_once.add_many(chunks)
        gone = data.draw(st.sets(st.sampled_from(known)) if known else st.just(set()))
        for index in (one_by_one, at_once):
            assert spans(index.find(prompt)) == slow_find(chunks, prompt)
            for text in gone:
                forget(index, text)
            assert spans(index.find(prompt)) == slow_find([c for c in chunks if c.text not in gone], prompt)


def random_text(rng: random.Random, n_words: int = 150) -> str:
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(n_words))


@pytest.mark.parametrize(
    "header", ["", "Report of the committee, confidential. " * 6], ids=["distinct", "shared header"]
)
def test_finding_compares_few_of_many_chunks(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    chunks = [make_chunk(header + random_text(rng), width=5) for _ in range(3000)]
    index = new_index()
    index.add_many(chunks)
    asked, ask = 0, index._catalogue._rows

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*arguments)

    monkeypatch.setattr(index._catalogue, "_rows", counted)
    inside = rng.sample(chunks, 20)
    matches = index.find("Context:\n" + "\n\n".join(c.text for c in inside))
    assert [m.chunk.key for m in matches] == [c.key for c in inside]
    assert all(m.whole for m in matches)
    assert 20 <= asked <= 20 * 4, "questions to the catalogue, whatever its size"


def test_texts_in_any_script_and_broken_ones() -> None:
    texts = ["\0" * 40, "e\u0301" * 30, "東京" * 30, "👩‍🚀" * 20, "\x7f\x80\xff\u0800" * 12, "\U0010ffff\ue000" * 20]
    index = make_index(*texts)
    assert found(index, "\ud835" + "\ud800".join(texts) + "\udfff") == [(t, t, True) for t in texts]
    cut = "西" + texts[2] + FOX
    index.add(make_chunk(cut))
    assert found(index, cut[:100] + "\ud835 and more") == [(cut, cut[:100], False)]


def test_what_another_process_adds_is_found_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "catalogue.sqlite")
    ours, theirs = (ChunkIndex(Catalogue(path), "ours") for _ in range(2))
    assert found(ours, FOX) == []
    theirs.add(make_chunk(FOX))
    assert found(ours, FOX) == [(FOX, FOX, True)]
    Catalogue(path).forget([ChunkKey(FOX)])
    assert found(ours, FOX) == []


def test_a_deleted_folder_is_forgotten_and_filled_again(tmp_path: Path) -> None:
    path = str(tmp_path / "store" / "catalogue.sqlite")
    ours, theirs = (ChunkIndex(Catalogue(path), "ours") for _ in range(2))
    ours.add(make_chunk(FOX))
    shutil.rmtree(tmp_path / "store")
    assert found(theirs, FOX + OWL) == found(ours, FOX + OWL) == []
    theirs.add(make_chunk(OWL))
    assert found(ours, FOX + OWL) == [(OWL, OWL, True)]


def test_an_anchor_is_the_same_everywhere() -> None:
    # Pinned: a change here hides every chunk of a catalogue and must come with a new CATALOGUE_VERSION.
    assert anchor.anchor_of(FOX) == 7230009096633264380
    assert anchor.anchors_of(OWL + FOX)[len(OWL)] == anchor.anchor_of(FOX)
    assert anchor.anchor_of(FOX[:31]) == anchor.UNFINDABLE


def test_readers_see_whole_states_while_writers_write() -> None:
    index, stop = make_index(FOX), threading.Event()
    failures: list[BaseException] = []

    def write(name: str) -> None:
        while not stop.is_set():
            for i in range(20):
                index.add(make_chunk(f"{FOX}{name}{i}"))
            for i in range(20):
                forget(index, f"{FOX}{name}{i}")

    def read() -> None:
        try:
            for _ in range(2000):
                assert found(index, FOX + "\n" + FOX)[0][:2] == (FOX, FOX)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert failures == []
    assert len(index) == 1
