"""Data files of questions with retrieved chunks, and the prompts made of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speccache_rag.errors import PromptError

SYSTEM = "You are a helpful assistant."

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n\n"
)
"""LongBench's wording (Bai et al., arXiv 2308.14508), up to the passages."""

QUESTION = (
    "\n\nAnswer the question based on the given passages. Answer with a few words only. Do not explain.\n\n"
    "Question: {question}"
)
"""What follows the passages, a little firmer than LongBench's: small chat models explain at length otherwise."""


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
    """One line of a data file."""

    model_config = ConfigDict(frozen=True, strict=True)

    id: str
    question: str = Field(min_length=1)
    answers: list[str] = Field(min_length=1)
    """Any of them is right."""
    chunks: list[Passage] = Field(min_length=1)

    @property
    def texts(self) -> list[str]:
        """The chunks as they stand in the prompt."""
        return [chunk.rendered for chunk in self.chunks]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt, as a chat."""
        return chat(INSTRUCTION + "\n\n".join(self.texts) + QUESTION.format(question=self.question))


def chat(content: str) -> list[dict[str, str]]:
    """A system message and one user message."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def read_examples(path: Path, n: int) -> list[Example]:
    """The first `n` examples of a JSON lines file, or all where there are fewer.

    A line is `{"id", "question", "answers": [..], "chunks": [{"title"?, "text"}]}`; other fields are ignored.

    Raises:
        PromptError: the file cannot be read, holds no example, or a line is none; the message names the line.
    """
    examples = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            for number, line in islice(lines, n):
                examples.append(_example(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"The data file {str(path)!r} cannot be read: {error}.") from error
    if not examples:
        raise PromptError(f"The data file {str(path)!r} holds no example.", hint="Give one JSON object a line.")
    return examples


def _example(path: Path, number: int, line: str) -> Example:
    try:
        return Example.model_validate_json(line)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'line'}: {e['msg']}" for e in error.errors())
        raise PromptError(
            f"Line {number} of {str(path)!r} is no example: {wrong}.",
            hint='A line is {"id", "question", "answers": [..], "chunks": [{"title", "text"}]}.',
        ) from error
