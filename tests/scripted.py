"""A running `SpecCache` that reads real prompts and answers from a script.

Agents, refiners and query writers need answers that a model of random weights never gives; what they put into the
prompt, and what is reused of it, stays real.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

from speccache_rag import SpecCache
from speccache_rag.plan.prompt_plan import Prompt
from speccache_rag.prompt.templates import ChatTemplate
from speccache_rag.types import Completion, Delta, PrefillReport, WarmReport


class ScriptedRuntime:
    """`replies` are given one after the other, then "OK" for ever; or a function makes each from the prompt's text."""

    def __init__(self, runtime: SpecCache, replies: Iterable[str] | Callable[[str], str] = ()) -> None:
        self._runtime = runtime
        self.config = runtime.config
        self.tokenizer = runtime.tokenizer
        self.max_model_len = runtime.max_model_len
        self._reply = replies if callable(replies) else _in_order(replies)
        self.prompts: list[str] = []
        """What the model read, templates applied."""
        self.reports: list[PrefillReport] = []
        """One for each prompt."""

    def warm(self, texts: Iterable[str], show_progress: bool = False) -> WarmReport:
        return self._runtime.warm(texts, show_progress=show_progress)

    def prefetch(self, texts: Iterable[str]) -> None:
        self._runtime.prefetch(texts)

    def generate(self, prompt: Prompt, **params: Any) -> Completion:
        return self._scripted(prompt, self._runtime.generate(prompt, **_one_token(params)))

    async def agenerate(self, prompt: Prompt, **params: Any) -> Completion:
        return self._scripted(prompt, await self._runtime.agenerate(prompt, **_one_token(params)))

    def stream(self, prompt: Prompt, **params: Any) -> Generator[Delta, None, None]:
        yield from _deltas(self.generate(prompt, **params))

    async def astream(self, prompt: Prompt, **params: Any) -> AsyncGenerator[Delta, None]:
        for delta in _deltas(await self.agenerate(prompt, **params)):
            yield delta

    def _scripted(self, prompt: Prompt, completion: Completion) -> Completion:
        text = prompt if isinstance(prompt, str) else ChatTemplate(self.tokenizer).render(prompt)
        self.prompts.append(text)
        self.reports.append(completion.report)
        return replace(completion, text=self._reply(text), finish_reason="stop")


def _in_order(replies: Iterable[str]) -> Callable[[str], str]:
    rest = iter(replies)
    return lambda _: next(rest, "OK")


def _one_token(params: dict[str, Any]) -> dict[str, Any]:
    """The real request needs no more than its first token, under no constraint."""
    return {**params, "max_tokens": 1, "structured_outputs": None, "stop": None}


def _deltas(completion: Completion) -> list[Delta]:
    words = completion.text.split(" ")
    pieces = [word + " " for word in words[:-1]] + words[-1:]
    return [*(Delta(piece) for piece in pieces), Delta("", completion)]
