"""From LangChain messages to turns for a chat template."""

from __future__ import annotations

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
from speccache_rag.prompt.templates import Turn, article

LEFT_OUT = (
    *("tool_call", "tool_use", "function_call", "invalid_tool_call", "server_tool_call", "server_tool_result"),
    *("reasoning", "thinking", "redacted_thinking", "reasoning_content"),
    *("cachePoint", "cache_point", "non_standard"),
)
"""Content that is said elsewhere in the message, or was meant for another service."""


def as_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """One turn for each message; texts of one message are joined by a newline.

    Tool calls and reasoning stand beside the text, for the chat template to show or to leave out. Blocks of a history
    that another model wrote (cache points, signatures, repeated tool calls) are left out.

    Raises:
        PromptError: a message holds an image or another medium, or is of a kind that models do not read.
    """
    return [_turn(message) for message in messages]


def _turn(message: BaseMessage) -> Turn:
    turn: Turn = {"role": _role(message), "content": "\n".join(_texts(message))}
    if isinstance(message, AIMessage):
        calls = [_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
        calls += [_call(call["id"], call["name"], call["args"]) for call in message.invalid_tool_calls]
        turn |= {"tool_calls": calls} if calls else {}
        reasoning = _reasoning(message)
        turn |= {"reasoning_content": reasoning} if reasoning else {}
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


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


def _texts(message: BaseMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content] if message.content else []
    texts = []
    for part in message.content:
        kind = "text" if isinstance(part, str) else part.get("type")
        text = part if isinstance(part, str) else part.get("text")
        if kind == "text" and isinstance(text, str):
            texts.append(text)
        elif kind not in LEFT_OUT and not (isinstance(part, dict) and "cachePoint" in part):
            raise PromptError(
                f"{article(message.type)} {message.type} message holds a block of type {kind!r}; SpecCache models read "
                "text only.",
                hint="Drop the block, or turn it into text first.",
            )
    return texts


def _reasoning(message: AIMessage) -> str:
    """What the model thought, in LangChain's three places for it."""
    said = message.additional_kwargs.get("reasoning_content")
    if isinstance(said, str):
        return said
    parts = message.content if isinstance(message.content, list) else []
    found = [part.get("reasoning") or part.get("thinking") for part in parts if isinstance(part, Mapping)]
    return "\n".join(text for text in found if isinstance(text, str))


def _call(call_id: str | None, name: str | None, arguments: Any) -> Mapping[str, Any]:
    function = {"name": name or "", "arguments": arguments}
    return {"id": call_id or "", "type": "function", "function": function}
