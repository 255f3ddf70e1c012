"""From completions and deltas of the runtime to LlamaIndex responses, for chat and completion alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.llms.speccache.events import fire_reuse_event
from llama_index.llms.speccache.tools import arguments

from speccache_rag.prompt.token_bytes import TokenBytes
from speccache_rag.runtime import SpecCache
from speccache_rag.spellings import warn_of_cut
from speccache_rag.types import Completion, Delta, ToolCall, ToolCallDelta, joined_calls

R = TypeVar("R")


@dataclass(slots=True)
class SoFar:
    """What there is of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """One more piece."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.calls += delta.tool_calls

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Put together from their pieces; the last one's arguments may be cut anywhere."""
        return joined_calls(self.calls)


Build = Callable[[str, str, Sequence[ToolCall], str | None, Mapping[str, Any]], R]
"""(text, reasoning, tool calls, new text where streamed, facts) -> response."""


def chat_response(
    text: str, reasoning: str, calls: Sequence[ToolCall], delta: str | None, facts: Mapping[str, Any]
) -> ChatResponse:
    """A chat response; `raw` holds usage and report once the answer is complete."""
    blocks: list[ContentBlock] = []
    if reasoning:
        blocks.append(ThinkingBlock(content=reasoning))
    if text or not calls:
        blocks.append(TextBlock(text=text))
    blocks += [
        ToolCallBlock(
            tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments(call.arguments) or call.arguments
        )
        for call in calls
    ]
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks), delta=delta, **facts)


def completion_response(
    text: str, reasoning: str, calls: Sequence[ToolCall], delta: str | None, facts: Mapping[str, Any]
) -> CompletionResponse:
    """The same as a completion response, which has no place for reasoning and calls of tools."""
    return CompletionResponse(text=text, delta=delta, **facts)


@dataclass(frozen=True, slots=True)
class Answers(Generic[R]):
    """Makes responses of one kind, and fires a `SpecCacheReuseEvent` for each complete one."""

    build: Build[R]
    model: str
    runtime: SpecCache
    """Its tokenizer is asked for where logprobs need it: loading it takes long, and an event loop may be waiting."""

    def whole(self, completion: Completion) -> R:
        """The response for an answer that was not streamed."""
        calls = completion.tool_calls
        return self.build(completion.text, completion.reasoning or "", calls, None, self._facts(completion))

    def stream(self, deltas: Generator[Delta, None, None]) -> Generator[R, None, None]:
        """One response for each delta, each with all there is so far."""
        so_far = SoFar()
        with closing(deltas):  # leaving early frees the request
            for delta in deltas:
                yield self._piece(delta, so_far)

    async def astream(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[R, None]:
        """`stream` for an event loop."""
        so_far = SoFar()
        async with aclosing(deltas):
            async for delta in deltas:
                yield self._piece(delta, so_far)

    def _piece(self, delta: Delta, so_far: SoFar) -> R:
        so_far.add(delta)
        facts = self._facts(delta.completion)
        if delta.reasoning:
            more = {"thinking_delta": delta.reasoning}  # where LlamaIndex's agents look for it
            facts["additional_kwargs"] = {**facts.get("additional_kwargs", {}), **more}
        return self.build(so_far.text, so_far.reasoning, so_far.tool_calls, delta.text, facts)

    def _facts(self, completion: Completion | None) -> dict[str, Any]:
        """`raw` in the shape LlamaIndex's token counters read, with the prefill report beside it."""
        if completion is None:
            return {}
        warn_of_cut(completion)
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
        tokenizer = self.runtime.tokenizer
        spelled = TokenBytes(tokenizer)

        def logprob(token_id: int, value: float) -> LogProb:
            return LogProb(token=str(tokenizer.decode([token_id])), logprob=value, bytes=list(spelled.of(token_id)))

        return [[logprob(token_id, value) for token_id, value in step.items()] for step in steps]
