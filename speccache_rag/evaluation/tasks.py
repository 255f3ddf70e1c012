"""Tasks: how the questions of a data set are put to a model, and which measures judge its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from speccache_rag.evaluation.metrics import best_f1, best_rouge_l, contains, exact_match

SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question. The wording is LongBench's (Bai et al., arXiv 2308.14508; MIT licence)."""

    instruction: str
    """What stands before the chunks."""
    question: str
    """What stands behind them; `{question}` is replaced."""
    max_new_tokens: int
    measures: Mapping[str, Callable[[str, Sequence[str]], float]]
    """By field of `Record`."""

    def messages(self, question: str, chunks: Sequence[str]) -> list[dict[str, str]]:
        """The prompt, as a chat."""
        asked = self.question.format(question=question)
        return chat(self.instruction + "\n\n".join(chunks) + asked)


def chat(content: str) -> list[dict[str, str]]:
    """A system message and one user message."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


QA = Task(
    instruction=(
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\n\n"
    ),
    # A little firmer than LongBench's: small chat models explain at length otherwise.
    question=(
        "\n\nAnswer the question based on the given passages. Answer with a few words only. Do not explain.\n\n"
        "Question: {question}"
    ),
    max_new_tokens=16,
    measures={"f1": best_f1, "em": exact_match},
)

NEEDLE = Task(QA.instruction, QA.question, 32, {"needle": contains, "f1": best_f1})

DIALOGUE = Task(
    instruction="Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
    question="\n\n{question}",
    max_new_tokens=64,
    measures={"rouge_l": best_rouge_l},
)

NEWS = Task(
    instruction="You are given several news passages. Write a one-page summary of all news.\n\nNews:\n",
    question="\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    max_new_tokens=128,
    measures={"rouge_l": best_rouge_l},
)

TASKS: Mapping[str, Task] = {"samsum": DIALOGUE, "multi_news": NEWS, "niah": NEEDLE}
"""By data set; all others are question answering."""


def task_of(dataset: str) -> Task:
    """The task of a data set by its name."""
    return TASKS.get(dataset, QA)
