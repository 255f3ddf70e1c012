from __future__ import annotations

from pathlib import Path

import pytest

from speccache_rag.engines.transformers.text import AnswerText
from tests.tiny import tiny_tokenizer


def feed(tmp_path: Path, text: str, stop: tuple[str, ...]) -> tuple[list[str], AnswerText]:
    tokenizer = tiny_tokenizer(tmp_path).backend_tokenizer
    answer = AnswerText(tokenizer, tokenizer.encode("Say:").ids, stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(answer.add(token))
        if answer.stopped:
            break
    return pieces, answer


def test_text_that_may_begin_a_stop_string_is_held_back(tmp_path: Path) -> None:
    pieces, answer = feed(tmp_path, "The end.\n\nQuestion: more", ("\n\nQuestion:",))
    given = ""
    for piece in pieces:
        given += piece
        assert "\n" not in given
    assert given == "The end."
    assert answer.stopped
    assert answer.finish() == ""


def test_what_only_looked_like_a_stop_string_is_given_out(tmp_path: Path) -> None:
    pieces, answer = feed(tmp_path, "a\n\nQuery", ("\n\nQuestion:",))
    assert "".join(pieces) == "a\n\nQuery"
    assert not answer.stopped
    pieces, answer = feed(tmp_path, "a\n\nQ", ("\n\nQuestion:",))
    assert "".join(pieces) == "a"
    assert answer.finish() == "\n\nQ"


def test_the_first_of_several_stop_strings_ends_the_text(tmp_path: Path) -> None:
    pieces, _ = feed(tmp_path, "one two three", ("three", "two"))
    assert "".join(pieces) == "one "


@pytest.mark.parametrize("text", ["東京 and Kraków", "a👩‍👩‍👧b", "é e\u0301"])
def test_a_character_of_several_tokens_appears_whole(tmp_path: Path, text: str) -> None:
    pieces, _ = feed(tmp_path, text, ())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
