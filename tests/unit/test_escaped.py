"""One warning where a prompt holds chunks as Python strings, and none where it does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from speccache_rag.chunks.escaped import EscapedChunks
from tests.unit.test_matching import FOX, OWL, make_index

TWO_LINES = f"{FOX}\n\n  {OWL}"
TAB = f"Name\tAge of the animals in the old wood\nfox\t{'3' * 40}"
QUOTES = f'"{FOX}" it\'s said, with a back\\slash, caf\u00e9, and an odd space:\u00a0{OWL}'
Told = Callable[[], list[logging.LogRecord]]
TEXTS = (TWO_LINES, TAB, QUOTES)


class Document:
    """As LangChain's, which shows its fields."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"Document(id='7', metadata={{'source': 'a.md'}}, page_content={self._text!r})"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """The warnings so far."""
    caplog.set_level(logging.WARNING, "speccache_rag.chunks.escaped")
    return lambda: list(caplog.records)


def look(*prompts: str, known: tuple[str, ...] = TEXTS) -> None:
    index = make_index(*known)
    escaped = EscapedChunks(index.find)
    for prompt in prompts:
        escaped.look(prompt, index.find(prompt))


@pytest.mark.parametrize("text", TEXTS, ids=["lines", "tab", "quotes"])
@pytest.mark.parametrize(
    "form", [lambda t: [t], lambda t: [Document(t)], lambda t: json.dumps({"text": t})], ids=["list", "doc", "json"]
)
def test_an_escaped_chunk_is_told(text: str, form: Callable[[str], object], told: Told) -> None:
    look(f"Context:\n{form(text)}\nQuestion: who?")
    assert len(told()) == 1
    assert "simple_summarize" in told()[0].getMessage()
    assert "join" in told()[0].getMessage()


def test_all_of_them_are_counted_and_told_once(told: Told) -> None:
    look(f"{list(TEXTS)}", f"{list(TEXTS)}", f"{[TAB]}")
    assert [record.args for record in told()] == [(3,)]


def test_a_cut_copy_up_to_the_line_break_hides_nothing(told: Told) -> None:
    # The first line is long enough to match alone, as the beginning of the chunk.
    index = make_index(TWO_LINES)
    prompt = f"{[TWO_LINES]}"
    matches = index.find(prompt)
    assert [match.whole for match in matches] == [False]
    EscapedChunks(index.find).look(prompt, matches)
    assert len(told()) == 1


def test_an_escaped_chunk_that_was_cut_is_told(told: Told) -> None:
    look(f"{[TWO_LINES[:-5]]}")
    assert [record.args for record in told()] == [(1,)]


@pytest.mark.parametrize(
    "escape", [r"\Uffffffff", r"\U0011ffff", r"\U00110000", r"\ud800", r"\U0000d800", r"\U0010ffff"]
)
def test_what_is_no_character_is_passed_over(escape: str, told: Told) -> None:
    look(f"A pattern {escape} of somebody's.", f"{[TAB]} {escape}")
    assert [record.args for record in told()] == [(1,)]


@pytest.mark.parametrize(
    "prompt",
    [
        f"Context:\n{TWO_LINES}\n{QUOTES}\nWho?",  # as they are
        f"{[FOX, OWL]}",  # one line each: they match
        r"A path C:\new\table and \'quotes\', nothing known.",
        rf"{FOX} then \n {OWL}",  # escapes between chunks that are found
        f"{TWO_LINES[:-5]} at C:\\new\\table",  # cut, not escaped; the escapes are another's
        f"{[TWO_LINES[:60]]}",  # too little of a chunk to be one
    ],
)
def test_nothing_to_tell(prompt: str, told: Told) -> None:
    look(prompt, known=(TWO_LINES, QUOTES, FOX, OWL))
    assert told() == []
