"""From completions and deltas of the runtime to LlamaIndex responses, for chat and completion alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LogProb, MessageRole
from llama_index.llms.speccache.events import fire_reuse_event

from speccache_rag.runtime import SpecCache
from speccache_rag.types import Completion, Delta

R = TypeVar("R")


def chat_response(text: str, delta: str | None, facts: Mapping[str, Any]) -> ChatResponse:
    """A chat response; `raw` holds usage and report once the answer is complete."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, **facts)


def completion_response(text: str, delta: str | None, facts: Mapping[str, Any]) -> CompletionResponse:
    """The same as a completion response."""
    return CompletionResponse(text=text, delta=delta, **facts)


@dataclass(frozen=True, slots=True)
class Answers(Generic[R]):
    """Makes responses of one kind, and fires a `SpecCacheReuseEvent` for each complete one."""

    build: Callable[[str, str | None, Mapping[str, Any]], R]
    """(text so far, new text where streamed, facts of a complete answer) -> response."""
    model: str
    runtime: SpecCache
    """Its tokenizer is asked for where logprobs need it: loading it takes long, and an event loop may be waiting."""

    def whole(self, completion: Completion) -> R:
        """The response for an answer that was not streamed."""
        return self.build(completion.text, None, self._facts(completion))

    def stream(self, deltas: Generator[Delta, None, None]) -> Generator[R, None, None]:
        """One response for each delta, each with all text so far."""
        text = ""
        with closing(deltas):  # leaving early frees the request
            for delta in deltas:
                text += delta.text
                yield self.build(text, delta.text, self._facts(delta.completion))

    async def astream(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[R, None]:
        """`stream` for an event loop."""
        text = ""
        async with aclosing(deltas):
            async for delta in deltas:
                text += delta.text
                yield self.build(text, delta.text, self._facts(delta.completion))

    def _facts(self, completion: Completion | None) -> dict[str, Any]:
        """`raw` in the shape LlamaIndex's token counters read, with the prefill report beside it."""
        if completion is None:
            return {}
        fire_reuse_event(self.model, completion)
        usage = completion.usage.to_dict()
        report, reason = completion.report.to_dict(), completion.finish_reason
        raw = {"model": self.model, "usage": usage, "speccache": report, "finish_reason": reason}
        return {
            "raw": raw,
            "additional_kwargs": usage,
            "logprobs": None if completion.logprobs is None else self._logprobs(completion.logprobs),
        }

    def _logprobs(self, steps: Sequence[Mapping[int, float]]) -> list[list[LogProb]]:
        """For each new token its alternatives, the chosen one first."""
        return [[self._logprob(token_id, logprob) for token_id, logprob in step.items()] for step in steps]

    def _logprob(self, token_id: int, logprob: float) -> LogProb:
        token = str(self.runtime.tokenizer.decode([token_id]))
        return LogProb(token=token, logprob=logprob, bytes=list(token.encode()))
