"""From completions and deltas of the runtime to LangChain's messages, generations and chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, GenerationChunk

from speccache_rag.runtime import SpecCache
from speccache_rag.types import Completion, Delta, Usage

PROVIDER = "speccache"


@dataclass(frozen=True, slots=True)
class Answers:
    """Makes LangChain's objects of one model's answers."""

    model: str
    runtime: SpecCache
    """Its tokenizer is asked for where logprobs need it: loading it takes long, and an event loop may be waiting."""

    def chat_result(self, completion: Completion) -> ChatResult:
        """A whole answer of a chat model."""
        message = AIMessage(
            content=completion.text,
            usage_metadata=_usage(completion.usage),
            response_metadata=self._facts(completion),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def chat_chunk(self, delta: Delta) -> ChatGenerationChunk:
        """A piece of a chat model's answer; the last one carries usage and report."""
        if delta.completion is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
        message = AIMessageChunk(
            content=delta.text,
            usage_metadata=_usage(delta.completion.usage),
            response_metadata=self._facts(delta.completion),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def generation(self, completion: Completion) -> Generation:
        """A whole answer of a completion model."""
        return Generation(text=completion.text, generation_info=self._text_facts(completion))

    def generation_chunk(self, delta: Delta) -> GenerationChunk:
        """A piece of a completion model's answer; the last one carries usage and report."""
        info = None if delta.completion is None else self._text_facts(delta.completion)
        return GenerationChunk(text=delta.text, generation_info=info)

    def _facts(self, completion: Completion) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "model_name": self.model,
            "model_provider": PROVIDER,
            "finish_reason": completion.finish_reason,
            "speccache": completion.report.to_dict(),
        }
        if completion.logprobs is not None:
            facts["logprobs"] = {"content": [self._logprobs(step) for step in completion.logprobs]}
        return facts

    def _text_facts(self, completion: Completion) -> dict[str, Any]:
        """Generations of completion models have no field for usage, so it stands among the facts."""
        return {**self._facts(completion), "usage": _usage(completion.usage)}

    def _logprobs(self, step: Mapping[int, float]) -> dict[str, Any]:
        """One new token in OpenAI's shape, which LangChain's users know: the chosen token, and all that compete."""
        tokens = [self._logprob(token_id, logprob) for token_id, logprob in step.items()]
        return {**tokens[0], "top_logprobs": tokens}  # engines put the chosen one first

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = str(self.runtime.tokenizer.decode([token_id]))
        return {"token": token, "bytes": list(token.encode()), "logprob": logprob}


def _usage(usage: Usage) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )
