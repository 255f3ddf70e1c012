"""From completions and deltas of the runtime to LangChain's messages, generations and chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCall, invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

from speccache_rag.prompt.token_bytes import TokenBytes
from speccache_rag.runtime import SpecCache
from speccache_rag.spellings import warn_of_cut
from speccache_rag.types import Completion, Delta, Usage
from speccache_rag.types import ToolCall as Called

PROVIDER = "speccache"


@dataclass(frozen=True, slots=True)
class Answers:
    """Makes LangChain's objects of one model's answers."""

    model: str
    runtime: SpecCache
    """Its tokenizer is asked for where logprobs need it: loading it takes long, and an event loop may be waiting."""

    def chat_result(self, completions: Sequence[Completion]) -> ChatResult:
        """The whole answers of a chat model to one prompt."""
        return ChatResult(generations=[ChatGeneration(message=self._message(one)) for one in completions])

    def chat_chunk(self, delta: Delta) -> ChatGenerationChunk:
        """A piece of a chat model's answer; the last one carries usage and report."""
        calls = [
            tool_call_chunk(name=piece.name, args=piece.arguments, id=piece.id, index=piece.index)
            for piece in delta.tool_calls
        ]
        facts: dict[str, Any] = {}
        if delta.completion is not None:
            facts = {
                "usage_metadata": _usage(delta.completion.usage),
                "response_metadata": self._facts(delta.completion),
                "chunk_position": "last",
            }
        message = AIMessageChunk(
            content=delta.text, tool_call_chunks=calls, additional_kwargs=_thought(delta.reasoning), **facts
        )
        return ChatGenerationChunk(message=message)

    def generation(self, completion: Completion) -> Generation:
        """A whole answer of a completion model."""
        return Generation(text=completion.text, generation_info=self._text_facts(completion))

    def generation_chunk(self, delta: Delta) -> GenerationChunk:
        """A piece of a completion model's answer; the last one carries usage and report."""
        info = None if delta.completion is None else self._text_facts(delta.completion)
        return GenerationChunk(text=delta.text, generation_info=info)

    def _message(self, completion: Completion) -> AIMessage:
        parsed = [_call(call) for call in completion.tool_calls]
        return AIMessage(
            content=completion.text,
            tool_calls=[call for call in parsed if call["type"] == "tool_call"],
            invalid_tool_calls=[call for call in parsed if call["type"] == "invalid_tool_call"],
            additional_kwargs=_thought(completion.reasoning),
            usage_metadata=_usage(completion.usage),
            response_metadata=self._facts(completion),
        )

    def _facts(self, completion: Completion) -> dict[str, Any]:
        warn_of_cut(completion)
        facts: dict[str, Any] = {
            "model_name": self.model,
            "model_provider": PROVIDER,
            "finish_reason": completion.finish_reason,
            "speccache": completion.report.to_dict(),
        }
        if completion.logprobs is not None:
            spelled = TokenBytes(self.runtime.tokenizer)
            facts["logprobs"] = {"content": [self._logprobs(step, spelled) for step in completion.logprobs]}
        return facts

    def _text_facts(self, completion: Completion) -> dict[str, Any]:
        """Generations of completion models have no field for usage, so it stands among the facts."""
        return {**self._facts(completion), "usage": _usage(completion.usage)}

    def _logprobs(self, step: Mapping[int, float], spelled: TokenBytes) -> dict[str, Any]:
        """One new token in OpenAI's shape, which LangChain's users know: the chosen token, and all that compete."""
        tokens = [
            {
                "token": str(self.runtime.tokenizer.decode([token_id])),
                "bytes": list(spelled.of(token_id)),
                "logprob": logprob,
            }
            for token_id, logprob in step.items()
        ]
        return {**tokens[0], "top_logprobs": tokens}  # engines put the chosen one first


def _call(call: Called) -> ToolCall | InvalidToolCall:
    """The call with its arguments read; LangChain has a place of its own for those that are no JSON object."""
    try:
        arguments = json.loads(call.arguments or "{}")
        problem = None if isinstance(arguments, dict) else "The arguments are no JSON object."
    except json.JSONDecodeError as error:
        arguments, problem = None, f"The arguments are no JSON: {error}."
    if problem is not None:
        return invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=problem)
    return tool_call(name=call.name, args=arguments, id=call.id)


def _thought(reasoning: str | None) -> dict[str, Any]:
    """Where LangChain's own models put it; `message.content_blocks` shows it as a block of reasoning."""
    return {"reasoning_content": reasoning} if reasoning else {}


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
