"""A running `SpecCache` that reads real prompts and answers from a script.

Agents, refiners and query writers need answers that a model of random weights never gives; what they put into the
prompt, and what is reused of it, stays real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

from speccache_rag import SpecCache
from speccache_rag.plan.call import Call
from speccache_rag.plan.prompt_plan import Prompt
from speccache_rag.prompt.templates import ChatTemplate
from speccache_rag.types import Chunk, Completion, Delta, PrefillReport, WarmReport


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

    def some_chunks(self, most: int) -> list[Chunk]:
        return self._runtime.some_chunks(most)

    def prefetch(self, texts: Iterable[str]) -> None:
        self._runtime.prefetch(texts)

    def generate(self, prompt: Prompt, **params: Any) -> Completion:
        return _last(self._scripted(prompt, params, self._runtime.generate(prompt, **_one_token(params))))

    async def agenerate(self, prompt: Prompt, **params: Any) -> Completion:
        real = await self._runtime.agenerate(prompt, **_one_token(params))
        return _last(await asyncio.to_thread(self._scripted, prompt, params, real))

    def stream(self, prompt: Prompt, **params: Any) -> Generator[Delta, None, None]:
        yield from self._scripted(prompt, params, self._runtime.generate(prompt, **_one_token(params)))

    async def astream(self, prompt: Prompt, **params: Any) -> AsyncGenerator[Delta, None]:
        real = await self._runtime.agenerate(prompt, **_one_token(params))
        for delta in await asyncio.to_thread(self._scripted, prompt, params, real):
            yield delta

    def _scripted(self, prompt: Prompt, params: dict[str, Any], real: Completion) -> list[Delta]:
        """The reply in pieces, read as a real answer is: tool calls in it are calls."""
        call = Call.of(prompt, params, self.config, self.tokenizer)
        text = prompt if isinstance(prompt, str) else ChatTemplate(self.tokenizer).render(call.prompt)
        self.prompts.append(text)
        self.reports.append(real.report)
        completion = replace(real, text=self._reply(text), finish_reason="stop")

        async def source() -> AsyncGenerator[Delta, None]:
            words = completion.text.split(" ")
            for piece in [word + " " for word in words[:-1]] + words[-1:]:
                yield Delta(piece, token_ids=tuple(self.tokenizer.encode(piece, add_special_tokens=False)))
            yield Delta("", completion)

        return list(self._runtime._open().loop.iterate(lambda: call.answer(source(), [])))


def _in_order(replies: Iterable[str]) -> Callable[[str], str]:
    rest = iter(replies)
    return lambda _: next(rest, "OK")


def _one_token(params: dict[str, Any]) -> dict[str, Any]:
    """The real request needs no more than its first token, under no constraint."""
    return {**params, "max_tokens": 1, "structured_outputs": None, "stop": None}


def _last(deltas: list[Delta]) -> Completion:
    completion = deltas[-1].completion
    assert completion is not None
    return completion
