"""From LangChain messages to turns."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_speccache.messages import Turn, as_turns
from speccache_rag.errors import PromptError

CALL = {"name": "search", "args": {"query": "Zürich"}, "id": "1"}
CALLED = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"query": "Zürich"}}}


def turn(message: BaseMessage) -> Turn:
    [found] = as_turns([message])
    return found


def text_of(content: object) -> str:
    return turn(HumanMessage(content))["content"]


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (SystemMessage("text"), "system"),
        (HumanMessage("text", name="someone"), "user"),
        (AIMessage("text"), "assistant"),
        (ToolMessage("text", tool_call_id="1"), "tool"),
        (FunctionMessage("text", name="search"), "tool"),
        (ChatMessage("text", role="critic"), "critic"),
    ],
)
def test_each_kind_of_message_has_its_role(message: BaseMessage, role: str) -> None:
    found = turn(message)
    assert (found["role"], found["content"]) == (role, "text")
    assert found.get("tool_call_id") == ("1" if isinstance(message, ToolMessage) else None)


def test_texts_of_one_message_are_joined() -> None:
    parts = ["one", {"type": "text", "text": "two"}]
    assert text_of(parts) == "one\ntwo"
    assert turn(ToolMessage(parts, tool_call_id="1"))["content"] == "one\ntwo"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image", "base64": "AA==", "mime_type": "image/png"},
        {"type": "audio", "base64": "AA==", "mime_type": "audio/wav"},
        {"type": "file", "base64": "AA==", "mime_type": "application/pdf"},
    ],
)
def test_what_is_not_text_is_refused_by_name(part: dict[str, object]) -> None:
    with pytest.raises(PromptError, match=f"human message holds a block of type '{part['type']}'"):
        text_of(["What is this?", part])


def test_a_command_to_the_history_is_no_message() -> None:
    with pytest.raises(PromptError, match="RemoveMessage is not a message to a model"):
        as_turns([RemoveMessage(id="1")])


def test_a_message_is_named_in_good_english() -> None:
    with pytest.raises(PromptError, match="^An ai message"):
        as_turns([AIMessage([{"type": "image", "base64": "AA=="}])])


def test_tool_calls_stand_beside_the_text() -> None:
    said = turn(AIMessage("Let me look.", tool_calls=[CALL]))
    assert said == {"role": "assistant", "content": "Let me look.", "tool_calls": [CALLED]}
    assert turn(AIMessage("", tool_calls=[CALL])) == {**said, "content": ""}


def test_a_call_that_stands_in_the_content_too_is_written_once() -> None:
    blocks = [{"type": "text", "text": "Let me look."}, {"type": "tool_call", **CALL}]
    said = turn(AIMessage(blocks, tool_calls=[CALL]))
    assert said == {"role": "assistant", "content": "Let me look.", "tool_calls": [CALLED]}


def test_a_call_that_could_not_be_read_is_not_lost() -> None:
    broken = {"name": "search", "args": '{"query": ', "id": "1", "error": None}
    [call] = turn(AIMessage("", invalid_tool_calls=[broken]))["tool_calls"]
    assert call["function"] == {"name": "search", "arguments": '{"query": '}


@pytest.mark.parametrize(
    "message",
    [
        AIMessage("Yes.", additional_kwargs={"reasoning_content": "The log says so."}),
        AIMessage(
            [{"type": "thinking", "thinking": "The log says so.", "signature": "x"}, {"type": "text", "text": "Yes."}]
        ),
        AIMessage([{"type": "reasoning", "reasoning": "The log says so."}, {"type": "text", "text": "Yes."}]),
    ],
    ids=["additional_kwargs", "thinking", "reasoning"],
)
def test_reasoning_stands_beside_the_text(message: AIMessage) -> None:
    assert turn(message) == {"role": "assistant", "content": "Yes.", "reasoning_content": "The log says so."}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "summary": []},
        {"type": "cachePoint", "cachePoint": {"type": "default"}},
        {"cachePoint": {"type": "default"}},
        {"type": "tool_use", "id": "1", "name": "search", "input": {}},
        {"type": "server_tool_call", "id": "1", "name": "search", "args": {}},
    ],
)
def test_blocks_for_other_services_are_left_out(part: dict[str, object]) -> None:
    assert turn(AIMessage([part, {"type": "text", "text": "Yes."}])) == {"role": "assistant", "content": "Yes."}
