"""Text in: prompts from the command line, chunks from files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from speccache_rag.errors import PromptError

SUFFIXES = (".md", ".txt")
"""Files taken from a folder."""

BORDERS = (re.compile(r"\n[^\S\n]*\n\s*"), re.compile(r"\n"), re.compile(r"(?<=[.!?])\s+"), re.compile(r"\s+"))
"""Where text may be cut, best first: paragraphs, lines, sentences, words."""


def read_prompt(argument: str) -> str:
    """The prompt itself; `-` reads standard input, `@FILE` a file.

    Raises:
        PromptError: the file cannot be read, or the prompt is empty.
    """
    if argument == "-":
        text = sys.stdin.read()
    elif argument.startswith("@"):
        try:
            text = Path(argument[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"The prompt file {argument[1:]!r} cannot be read: {error}.") from error
    else:
        text = argument
    if not text.strip():
        raise PromptError("The prompt is empty.", hint="Give a text, - for standard input, or @FILE.")
    return text


def read_documents(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of files and of the .md and .txt files in folders (sorted, at any depth); `-` is standard input.

    Raises:
        PromptError: a file is missing or not UTF-8 text.
    """
    for path in paths:
        if str(path) == "-":
            yield sys.stdin.read()
            continue
        inside = (p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else (path,)
        for file in sorted(inside):
            try:
                yield file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise PromptError(f"{str(file)!r} cannot be read as text: {error}.") from error


def split_text(text: str, max_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Cut a text into chunks of at most `max_tokens`, at paragraph borders where possible.

    Neighbouring paragraphs are packed into one chunk while they fit. A paragraph that is too long is cut at lines,
    then sentences, then words; a single longer word is cut in halves. Chunks are stripped, never empty, and each is
    found verbatim in the text.

    Args:
        text: Any text.
        max_tokens: Limit of a chunk, as counted by `count`.
        count: Number of tokens in a string.
    """
    return [text[start:end] for start, end in _cut(text, 0, len(text), max_tokens, count, level=0)]


def _cut(
    text: str, start: int, end: int, limit: int, count: Callable[[str], int], level: int
) -> Iterator[tuple[int, int]]:
    """Character ranges of chunks in `text[start:end]`, cut at the borders of `level` and, where needed, deeper."""
    start, end = _stripped(text, start, end)
    if start == end:
        return
    if count(text[start:end]) <= limit or end - start == 1:
        yield start, end
        return
    if level == len(BORDERS):
        middle = (start + end) // 2
        yield from _cut(text, start, middle, limit, count, level)
        yield from _cut(text, middle, end, limit, count, level)
        return
    open_start = open_end = start
    for piece_end in _piece_ends(text, start, end, level):
        if count(text[open_start:piece_end].rstrip()) > limit:
            yield from _cut(text, open_start, open_end, limit, count, level + 1)
            open_start = open_end
        open_end = piece_end
    yield from _cut(text, open_start, open_end, limit, count, level + 1)


def _piece_ends(text: str, start: int, end: int, level: int) -> Iterator[int]:
    """Where each piece between borders ends, the border included."""
    yield from (match.end() for match in BORDERS[level].finditer(text, start, end))
    yield end


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    """The range without white space at its ends."""
    inner = text[start:end]
    return (start + len(inner) - len(inner.lstrip()), start + len(inner.rstrip())) if inner.strip() else (start, start)
