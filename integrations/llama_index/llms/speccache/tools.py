"""Tool calls in LlamaIndex's own form, for agents and function-calling programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import BaseTool


class ToolCallingLLM(FunctionCallingLLM):
    """An LLM that is given tools as options of a call, and answers with blocks that call them."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Messages and options of one `chat`."""
        asked = [ChatMessage(role=MessageRole.USER, content=user_msg)] if isinstance(user_msg, str) else [user_msg]
        messages = [*(chat_history or []), *(message for message in asked if message is not None)]
        if not tools:
            return {"messages": messages, **kwargs}
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": "required" if tool_required else "auto",
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tools that an answer calls. Arguments that are no JSON object, or not one yet, count as none.

        Raises:
            ValueError: there is no call, and that is an error.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"The answer calls no tool: {response.message.content!r}.")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=arguments(call.tool_kwargs)
            )
            for call in calls
        ]


def arguments(written: dict[str, Any] | str) -> dict[str, Any]:
    """Arguments as values; empty where the text is no JSON object."""
    if isinstance(written, dict):
        return written
    try:
        read = json.loads(written or "{}")
    except json.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}
