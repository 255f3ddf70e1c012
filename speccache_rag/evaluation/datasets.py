"""Data files of questions: with their retrieved chunks, as LongBench has them, or questions alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from speccache_rag.errors import PromptError
from speccache_rag.evaluation.tasks import Task, task_of

FORM = 'A line is {"id", "question", "answers": [..], "chunks": [{"title", "text"}]}.'

Retrieve = Callable[[str], Sequence[str]]
"""From a question to the texts retrieved for it, best first."""


class Passage(BaseModel):
    """One retrieved chunk; other fields of the file are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    title: str | None = None
    text: str = Field(min_length=1)

    @property
    def rendered(self) -> str:
        """The chunk's text in the prompt, the title on a line of its own."""
        return f"{self.title}\n{self.text}".strip() if self.title else self.text.strip()


class Example(BaseModel):
    """One question with its chunks."""

    model_config = ConfigDict(frozen=True, strict=True)

    id: str
    question: str = Field(min_length=1)
    answers: list[str] = Field(default_factory=list)
    """Any of them is right; none where nobody knows, and then only full recompute is there to compare with."""
    chunks: list[Passage] = Field(min_length=1, validation_alias=AliasChoices("chunks", "ctxs"))
    dataset: str = ""
    """Name of the data set; of the file where it says nothing."""

    @property
    def texts(self) -> list[str]:
        """The chunks as they stand in the prompt."""
        return [chunk.rendered for chunk in self.chunks]

    @property
    def task(self) -> Task:
        """How the question is put."""
        return task_of(self.dataset)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt, as a chat."""
        return self.task.messages(self.question, self.texts)


def read_examples(path: Path, n: int, retrieve: Retrieve | None = None) -> list[Example]:
    """The first `n` examples of a file, or all where there are fewer.

    Three forms are read, told apart by what a line holds; other fields are ignored:

    - `{"id", "question", "answers": [..], "chunks": [{"title"?, "text"}]}`; `ctxs` is another name of `chunks`, and
      without an id the line number stands for it;
    - LongBench's: `{"input", "context", "answers", "dataset", "_id"}`, whose context is cut where its passages begin,
      or at empty lines;
    - questions alone, as text or as `{"question", "answers"?}`, for which `retrieve` finds the chunks.

    Raises:
        PromptError: the file cannot be read, holds no example, or a line is none; the message names the line.
    """
    examples = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in islice(lines, n):
                examples.append(_example(path, number, line, retrieve))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"The data file {str(path)!r} cannot be read: {error}.") from error
    if not examples:
        raise PromptError(f"The data file {str(path)!r} holds no example.", hint="Give one JSON object a line.")
    return examples


def _example(path: Path, number: int, line: str, retrieve: Retrieve | None) -> Example:
    try:
        value = _value(line, retrieve)
        if value is None:
            raise PromptError(f"Line {number} of {str(path)!r} is no example: it is no JSON object.", hint=FORM)
        value.setdefault("id", str(number))
        value.setdefault("dataset", path.stem)
        if not isinstance(value.get("dataset"), str):
            value["dataset"] = path.stem
        if retrieve is not None and not ({"chunks", "ctxs"} & set(value)):
            value["chunks"] = [{"text": text} for text in retrieve(value.get("question", ""))]
        return Example.model_validate(value)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in error.errors())
        raise PromptError(f"Line {number} of {str(path)!r} is no example: {wrong}.", hint=FORM) from error


def _value(line: str, retrieve: Retrieve | None) -> dict[str, Any] | None:
    """The line's fields under this package's names; None where it is neither an object nor a question alone."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None if retrieve is None else {"question": line.strip()}
    if not isinstance(value, dict):
        return None
    if "context" in value and "input" in value:
        return {
            **({"id": str(value["_id"])} if value.get("_id") else {}),
            "question": value["input"] or "Summarize.",
            "answers": value.get("answers") or [],
            "dataset": value.get("dataset"),
            "chunks": [{"text": text} for text in passages(value["context"])],
        }
    return dict(value)


def passages(context: str) -> Iterator[str]:
    """The chunks of LongBench's context: its passages, or its paragraphs where none are marked."""
    marked = re.split(r"(?m)^(?=Passage \d+:)", context)
    parts = marked if len(marked) > 2 else re.split(r"\n\s*\n", context)
    return (part.strip() for part in parts if part.strip())
