"""`Call`: what a caller asked for beyond the prompt's plan, and how the answer is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.readers import READERS, AnswerReader, ReaderRequest
from speccache_rag.errors import ConfigurationError, RequestTimeout, UnsupportedVersion
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.notation import reasoning_notation, tool_notation
from speccache_rag.types import Completion, Delta, ToolCall, ToolCallDelta, joined_calls

CHAT_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
"""Options of a call that make sense for messages only."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `generate` or `stream`."""

    prompt: str | Chat
    sampling: Mapping[str, Any]
    """What the engine is asked for."""
    reader: AnswerReader | None
    """None where the text is the whole answer."""
    timeout_s: float | None
    started: float
    """`time.perf_counter()` at submission."""

    @classmethod
    def of(
        cls,
        prompt: str | Chat | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        config: SpecCacheConfig,
        tokenizer: PreTrainedTokenizerBase,
        started: float | None = None,
    ) -> Call:
        """The call that these options make of a prompt, `started` at a `time.perf_counter()`, now by default.

        Raises:
            ConfigurationError: an option is out of range, or belongs to messages and the prompt is text; or tools are
                given, and nothing here reads calls of them.
        """
        started = time.perf_counter() if started is None else started
        sampling = dict(options)
        timeout_s = _seconds(sampling.pop("timeout", None))
        if (n := sampling.pop("n", None)) not in (None, 1):
            raise ConfigurationError(
                f"n is {n!r}, and one call gives one answer.",
                hint="Call n times, with a seed each, at once if you like: all reuse the same stored KV.",
            )
        if isinstance(prompt, str):
            if given := [name for name in CHAT_OPTIONS if sampling.pop(name, None)]:
                raise ConfigurationError(
                    f"{', '.join(given)} given, and the prompt is text.", hint="Pass messages: a chat template is used."
                )
            return cls(prompt, sampling, None, timeout_s, started)
        chat = prompt if isinstance(prompt, Chat) else Chat.of(prompt, sampling, config.chat_template_kwargs)
        reader = _reader(chat, sampling, config, tokenizer)
        return cls(chat, reader.sampling if reader else sampling, reader, timeout_s, started)

    async def answer(
        self, deltas: AsyncGenerator[Delta, None], prompt_ids: Sequence[int]
    ) -> AsyncGenerator[Delta, None]:
        """The deltas, read, and ended where the call's time is over.

        Raises:
            RequestTimeout: it was; the deltas' source is closed, which frees the request.
        """
        left_s = None if self.timeout_s is None else self.timeout_s - (time.perf_counter() - self.started)
        limit = asyncio.timeout(left_s)
        try:
            async with limit, aclosing(deltas):
                await asyncio.sleep(0)  # a limit that planning used up ends the call here
                async for delta in self._read(deltas, prompt_ids):
                    yield delta
        except TimeoutError as error:
            if not limit.expired():
                raise  # somebody else's
            raise RequestTimeout(f"The answer was not complete after {self.timeout_s} s.") from error

    async def _read(
        self, deltas: AsyncGenerator[Delta, None], prompt_ids: Sequence[int]
    ) -> AsyncGenerator[Delta, None]:
        text, reasoning = "", ""
        calls: list[ToolCallDelta] = []
        async for delta in deltas:
            if self.reader is None:
                yield delta
                continue
            piece = self._wanted(self.reader.read(delta, prompt_ids))
            text += piece.text
            reasoning += piece.reasoning
            calls += piece.tool_calls
            if delta.completion is not None:
                piece = replace(piece, completion=_whole(delta.completion, text, reasoning, joined_calls(calls)))
            if piece.text or piece.reasoning or piece.tool_calls or piece.completion is not None:
                yield piece

    def _wanted(self, piece: Delta) -> Delta:
        """The piece without tool calls beyond the first, where the caller takes one only."""
        if not isinstance(self.prompt, Chat) or self.prompt.parallel_tool_calls:
            return piece
        return replace(piece, tool_calls=tuple(call for call in piece.tool_calls if call.index == 0))


def _whole(completion: Completion, text: str, reasoning: str, calls: tuple[ToolCall, ...]) -> Completion:
    reason = completion.finish_reason
    return replace(
        completion,
        text="" if calls and not text.strip() else text,  # line ends around a call are no answer
        reasoning=reasoning or None,
        tool_calls=calls,
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
    )


def _reader(
    chat: Chat, sampling: Mapping[str, Any], config: SpecCacheConfig, tokenizer: PreTrainedTokenizerBase
) -> AnswerReader | None:
    template = str(tokenizer.chat_template or "")
    tool_parser = tool_notation(template, config.tool_parser) if chat.tools else None
    reasoning_parser = reasoning_notation(template, config.reasoning_parser)
    if chat.tools and tool_parser is None:
        raise ConfigurationError(
            f"The chat template of {config.model!r} does not say how it writes tool calls.",
            hint="Name vLLM's parser for this model: tool_parser='hermes'; `vllm serve --help` lists them.",
        )
    if tool_parser is None and reasoning_parser is None:
        return None
    request = ReaderRequest(chat, sampling, tokenizer, tool_parser, reasoning_parser)
    try:
        reader: AnswerReader = READERS.load("vllm")(request)
    except UnsupportedVersion as error:
        if chat.tools or config.reasoning_parser is not None:
            raise ConfigurationError(
                f"Tool calls and reasoning are read by vLLM's parsers: {error.message}",
                hint=f"{error.hint} The Transformers engine needs it for that too.",
            ) from error
        return None  # the reasoning stays in the answer
    return reader


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ConfigurationError(f"timeout is {timeout!r}.", hint="Pass seconds, more than 0, or None for no limit.")
    return float(timeout)
