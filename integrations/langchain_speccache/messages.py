"""From LangChain messages to turns, each with a role and a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from speccache_rag.errors import PromptError
from speccache_rag.prompt.templates import Turn

CALLS = ("tool_call", "tool_use", "function_call", "invalid_tool_call")
"""Content that repeats a message's `tool_calls`."""


def as_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """One turn for each message; texts of one message are joined by a newline, tool calls follow its text.

    Raises:
        PromptError: a message holds something other than text, or is of a kind that models do not read.
    """
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    match message:
        case SystemMessage():
            return "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case ChatMessage():
            return message.role
    raise PromptError(f"A {type(message).__name__} is not a message to a model.", hint="Take it out of the list.")


def _content(message: BaseMessage) -> str:
    parts = _texts(message)
    if isinstance(message, AIMessage):
        parts += [_call(call) for call in (*message.tool_calls, *message.invalid_tool_calls)]
    return "\n".join(parts)


def _texts(message: BaseMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content] if message.content else []
    texts = []
    for part in message.content:
        kind = "text" if isinstance(part, str) else part.get("type")
        text = part if isinstance(part, str) else part.get("text")
        if kind == "text" and isinstance(text, str):
            texts.append(text)
        elif kind not in CALLS:
            raise PromptError(
                f"A {message.type} message holds a block of type {kind!r}; SpecCache models read text only.",
                hint="Drop the block, or turn it into text first.",
            )
    return texts


def _call(call: Mapping[str, Any]) -> str:
    """A tool call in the notation of Hermes and Qwen; no notation is common to all models."""
    body = json.dumps({"name": call["name"], "arguments": call["args"]}, ensure_ascii=False, default=str)
    return f"<tool_call>\n{body}\n</tool_call>"
