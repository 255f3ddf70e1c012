"""From completions and deltas of the runtime to LlamaIndex responses, for chat and completion alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from speccache_rag.types import Completion, Delta

R = TypeVar("R")
Build = Callable[[str, str | None, Completion | None], R]
"""(text so far, new text where streamed, the completion once it is there) -> response."""


def chat_response(text: str, delta: str | None, completion: Completion | None) -> ChatResponse:
    """A chat response; `raw` holds usage and report once the answer is complete."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, **_facts(completion))


def completion_response(text: str, delta: str | None, completion: Completion | None) -> CompletionResponse:
    """The same as a completion response."""
    return CompletionResponse(text=text, delta=delta, **_facts(completion))


def whole(completion: Completion, build: Build[R]) -> R:
    """The response for an answer that was not streamed."""
    return build(completion.text, None, completion)


def cumulate(deltas: Generator[Delta, None, None], build: Build[R]) -> Generator[R, None, None]:
    """One response for each delta, each with all text so far."""
    text = ""
    with closing(deltas):  # leaving early frees the request
        for delta in deltas:
            text += delta.text
            yield build(text, delta.text, delta.completion)


async def acumulate(deltas: AsyncGenerator[Delta, None], build: Build[R]) -> AsyncGenerator[R, None]:
    """`cumulate` for an asynchronous stream."""
    text = ""
    async with aclosing(deltas):
        async for delta in deltas:
            text += delta.text
            yield build(text, delta.text, delta.completion)


def _facts(completion: Completion | None) -> dict[str, Any]:
    """`raw` in the shape LlamaIndex's token counters read, with the prefill report beside it."""
    if completion is None:
        return {}
    usage = completion.usage.to_dict()
    raw: dict[str, Any] = {
        "usage": usage,
        "speccache": completion.report.to_dict(),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        raw["logprobs"] = completion.logprobs
    return {"raw": raw, "additional_kwargs": usage}
