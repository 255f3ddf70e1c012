"""vLLM's own parsers of reasoning and tool calls, for one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager

from speccache_rag.engines.readers import ReaderRequest
from speccache_rag.errors import ConfigurationError
from speccache_rag.prompt.chat import CHOICES, Chat
from speccache_rag.types import Delta, ToolCallDelta


class VllmReader:
    """`AnswerReader` over the parsers that `vllm serve` streams through."""

    def __init__(self, request: ReaderRequest) -> None:
        """Make the parsers, and the grammar of a forced call.

        Raises:
            ConfigurationError: a parser is unknown or cannot work with this tokenizer, or a tool is not well formed.
        """
        tools = request.tool_parser if request.chat.tools else None
        # A grammar holds from the first token on, so nothing is thought before such an answer.
        guided = request.chat.forced or request.sampling.get("structured_outputs") is not None
        reasoning = None if guided else request.reasoning_parser
        asked: Any = _asked(request.chat)
        try:
            parser: Any = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True)
            self._parser: Parser | None = None
            if parser is not None:
                variables = dict(request.chat.template_kwargs)
                self._parser = parser(request.tokenizer, asked.tools, chat_template_kwargs=variables)
                asked = self._parser.adjust_request(asked)
        except (ValueError, RuntimeError, TypeError, KeyError, VLLMClientError) as error:
            raise ConfigurationError(
                f"vLLM cannot read answers with tool_parser {tools!r} and reasoning_parser {reasoning!r}: {error}",
                hint="Name other parsers with tool_parser= and reasoning_parser=; `vllm serve --help` lists them.",
            ) from error
        self._request: ChatCompletionRequest = asked
        self.sampling = _sampling(request.sampling, asked)

    def read(self, piece: Delta, prompt_ids: Sequence[int]) -> Delta:
        """See `AnswerReader.read`."""
        if self._parser is None:
            return piece
        message = self._parser.parse_delta(
            piece.text,
            list(piece.token_ids),
            self._request,
            list(prompt_ids),
            finished=piece.completion is not None,
        )
        return _delta(message or DeltaMessage(), piece)


def _asked(chat: Chat) -> ChatCompletionRequest:
    """The chat as vLLM's server would have got it, as far as its parsers look at it."""
    choice: Any = chat.tool_choice
    if choice not in CHOICES:
        choice = {"type": "function", "function": {"name": choice}}
    # Elsewhere "one call only" would put the whole answer under a grammar, which not every engine has.
    parallel = chat.parallel_tool_calls or not chat.forced
    tools = {"tools": list(chat.tools), "tool_choice": choice, "parallel_tool_calls": parallel}
    try:
        return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **(tools if chat.tools else {}))
    except ValidationError as error:
        raise ConfigurationError(f"vLLM refuses these tools: {error}", hint="See OpenAI's shape of a tool.") from error


def _sampling(given: Mapping[str, Any], request: ChatCompletionRequest) -> dict[str, Any]:
    changed = dict(given)
    if not request.skip_special_tokens:
        changed["skip_special_tokens"] = False  # some models write their marks of a tool call as such tokens
    if request.structured_outputs is not None:
        changed["structured_outputs"] = request.structured_outputs
    return changed


def _delta(message: DeltaMessage, piece: Delta) -> Delta:
    calls = tuple(map(_call, message.tool_calls or ()))
    return Delta(message.content or "", piece.completion, message.reasoning or "", calls, piece.token_ids)


def _call(call: DeltaToolCall) -> ToolCallDelta:
    function = call.function
    name, arguments = (None, None) if function is None else (function.name, function.arguments)
    return ToolCallDelta(call.index, call.id, name, arguments or "")
