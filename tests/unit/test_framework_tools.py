"""Tools and reasoning in each framework's own form, against a scripted runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import CachePoint, CitableBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.speccache import SpecCacheLLM

from langchain_speccache import ChatSpecCache
from speccache_rag.types import ToolCallDelta
from tests.unit.fake_runtime import FakeRuntime, FakeTokenizer

CALL = [
    ToolCallDelta(0, "call-1", "look"),
    ToolCallDelta(0, arguments='{"query": '),
    ToolCallDelta(0, arguments='"fire"}'),
    ToolCallDelta(1, "call-2", "look", '{"query": "log"}'),
]
BROKEN = [ToolCallDelta(0, "call-1", "look", '{"query": fire}')]
THOUGHT = ["The log ", "says so."]


@tool
def look(query: str) -> str:
    """Looks it up."""
    return f"found {query}"


def look_up(query: str) -> str:
    """Looks it up."""
    return f"found {query}"


def runtime_of(calls: Sequence[ToolCallDelta] = (), **options: Any) -> FakeRuntime:
    return FakeRuntime(tool_calls=calls, tokenizer=FakeTokenizer(knows_tools=True), **options)


# LangChain.


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", "auto"),
        ("any", "required"),
        (True, "required"),
        ("required", "required"),
        ("look", "look"),
    ],
)
def test_bound_tools_reach_the_runtime(choice: Any, expected: Any) -> None:
    runtime = runtime_of(CALL)
    ChatSpecCache(runtime=runtime).bind_tools([look], tool_choice=choice, parallel_tool_calls=False).invoke("Who?")
    _, params = runtime.calls[0]
    [asked] = params["tools"]
    assert (asked["type"], asked["function"]["name"]) == ("function", "look")
    assert asked["function"]["parameters"]["required"] == ["query"]
    assert (params.get("tool_choice"), params["parallel_tool_calls"]) == (expected, False)


def test_a_message_holds_the_calls() -> None:
    message = ChatSpecCache(runtime=runtime_of(CALL, pieces=())).bind_tools([look]).invoke("Who?")
    assert [(call["name"], call["args"], call["id"]) for call in message.tool_calls] == [
        ("look", {"query": "fire"}, "call-1"),
        ("look", {"query": "log"}, "call-2"),
    ]
    assert (message.content, message.response_metadata["finish_reason"]) == ("", "tool_calls")


def test_streamed_calls_add_up() -> None:
    chunks = list(ChatSpecCache(runtime=runtime_of(CALL)).bind_tools([look]).stream("Who?"))
    assert any(chunk.tool_call_chunks for chunk in chunks[:-1])
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    assert [(call["name"], call["args"], call["id"]) for call in total.tool_calls] == [
        ("look", {"query": "fire"}, "call-1"),
        ("look", {"query": "log"}, "call-2"),
    ]


def test_arguments_that_do_not_parse_are_invalid_calls() -> None:
    message = ChatSpecCache(runtime=runtime_of(BROKEN)).bind_tools([look]).invoke("Who?")
    assert message.tool_calls == []
    [call] = message.invalid_tool_calls
    assert (call["name"], call["args"]) == ("look", '{"query": fire}')
    assert "no JSON" in str(call["error"])


def test_langchain_shows_reasoning_apart() -> None:
    llm = ChatSpecCache(runtime=runtime_of(reasoning=THOUGHT))
    message = llm.invoke("Who?")
    assert (message.text, message.additional_kwargs) == ("The answer.", {"reasoning_content": "The log says so."})
    assert {"type": "reasoning", "reasoning": "The log says so."} in message.content_blocks
    total: Any = None
    for chunk in llm.stream("Who?"):
        total = chunk if total is None else total + chunk
    assert (total.text, total.additional_kwargs) == ("The answer.", {"reasoning_content": "The log says so."})


def test_an_answer_goes_back_into_the_history_as_it_came() -> None:
    runtime = runtime_of(CALL, reasoning=THOUGHT, pieces=())
    llm = ChatSpecCache(runtime=runtime).bind_tools([look])
    message = llm.invoke("Who?")
    llm.invoke([("human", "Who?"), message, look.invoke({**message.tool_calls[0], "type": "tool_call"})])
    _, turn, result = runtime.calls[1][0]
    assert turn["reasoning_content"] == "The log says so."
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"query": "fire"}, {"query": "log"}]
    assert result == {"role": "tool", "content": "found fire", "tool_call_id": "call-1"}


# LlamaIndex.


@pytest.mark.parametrize(("required", "choice"), [(False, "auto"), (True, "required")])
async def test_chat_with_tools_reaches_the_runtime(required: bool, choice: str) -> None:
    runtime = runtime_of(CALL)
    llm, tools = SpecCacheLLM(runtime=runtime), [FunctionTool.from_defaults(look_up, name="look")]
    history = [ChatMessage("Hello."), ChatMessage("Yes?", role="assistant")]
    options: dict[str, Any] = {"tool_required": required, "allow_parallel_tool_calls": True}
    responses = [
        llm.chat_with_tools(tools, "Who?", history, **options),
        await llm.achat_with_tools(tools, "Who?", history, **options),
        list(llm.stream_chat_with_tools(tools, "Who?", history, **options))[-1],
        [r async for r in await llm.astream_chat_with_tools(tools, "Who?", history, **options)][-1],
    ]
    for (prompt, params), response in zip(runtime.calls, responses, strict=True):
        assert [turn["content"] for turn in prompt] == ["Hello.", "Yes?", "Who?"]
        assert params["tools"][0]["function"]["name"] == "look"
        assert (params["tool_choice"], params["parallel_tool_calls"]) == (choice, True)
        selected = llm.get_tool_calls_from_response(response)
        assert [(call.tool_id, call.tool_name, call.tool_kwargs) for call in selected] == [
            ("call-1", "look", {"query": "fire"}),
            ("call-2", "look", {"query": "log"}),
        ]


def test_a_call_that_is_still_being_written_has_no_arguments_yet() -> None:
    llm = SpecCacheLLM(runtime=runtime_of(CALL, pieces=()))
    seen = [
        llm.get_tool_calls_from_response(r, error_on_no_tool_call=False) for r in llm.stream_chat([ChatMessage("?")])
    ]
    assert [[call.tool_kwargs for call in calls] for calls in seen[:3]] == [[{}], [{}], [{"query": "fire"}]]
    with pytest.raises(ValueError, match="calls no tool: 'The answer.'"):
        llm.get_tool_calls_from_response(SpecCacheLLM(runtime=runtime_of()).chat([ChatMessage("?")]))


def test_llama_index_shows_reasoning_as_a_block() -> None:
    llm = SpecCacheLLM(runtime=runtime_of(reasoning=THOUGHT))
    response = llm.chat([ChatMessage("Who?")])
    assert response.message.blocks == [ThinkingBlock(content="The log says so."), TextBlock(text="The answer.")]
    assert response.message.content == "The answer."
    streamed = list(llm.stream_chat([ChatMessage("Who?")]))
    assert "".join(r.additional_kwargs.get("thinking_delta", "") for r in streamed) == "The log says so."
    assert "".join(r.delta or "" for r in streamed) == "The answer."
    assert streamed[-1].message.blocks == response.message.blocks
    assert llm.complete("Who?").text == "The answer."


def test_a_history_of_any_kind_is_read() -> None:
    runtime = runtime_of()
    history = [
        ChatMessage(role="user", blocks=[TextBlock(text="Who?"), CachePoint(cache_control={"type": "ephemeral"})]),
        ChatMessage(
            role="assistant",
            blocks=[
                ThinkingBlock(content="Look."),
                TextBlock(text="Let me see."),
                ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={"query": "fire"}),
                ToolCallBlock(tool_call_id="2", tool_name="look", tool_kwargs='{"query": "log"}'),
            ],
        ),
        ChatMessage(
            role="tool",
            blocks=[CitableBlock(title="log", source="log", content=[TextBlock(text="The keeper.")])],
            additional_kwargs={"tool_call_id": "1"},
        ),
        ChatMessage(
            role="assistant",
            content="",
            additional_kwargs={
                "tool_calls": [{"id": "3", "function": {"name": "look", "arguments": '{"query": "x"}'}}]
            },
        ),
    ]
    SpecCacheLLM(runtime=runtime).chat(history)
    asked, called, result, older = runtime.calls[0][0]
    assert asked == {"role": "user", "content": "Who?"}
    assert (called["content"], called["reasoning_content"]) == ("Let me see.", "Look.")
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [{"query": "fire"}, {"query": "log"}]
    assert result == {"role": "tool", "content": "The keeper.", "tool_call_id": "1"}
    assert older["tool_calls"][0]["function"] == {"name": "look", "arguments": {"query": "x"}}


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_a_tool(streaming: bool) -> None:
    asked = []

    def once(query: str) -> str:
        """Looks it up."""
        asked.append(query)
        runtime.tool_calls = ()
        return f"found {query}"

    runtime = runtime_of(CALL[:3])
    agent = FunctionAgent(tools=[once], llm=SpecCacheLLM(runtime=runtime), streaming=streaming)
    runtime.tool_calls = [ToolCallDelta(0, "call-1", "once", '{"query": "fire"}')]
    assert str(await agent.run("Who?")) == "The answer."
    assert asked == ["fire"]
    assert runtime.calls[-1][0][-1] == {"role": "tool", "content": "found fire", "tool_call_id": "call-1"}


def test_a_template_without_tools_makes_no_function_calling_model() -> None:
    assert not SpecCacheLLM(runtime=FakeRuntime()).metadata.is_function_calling_model
    assert SpecCacheLLM(runtime=runtime_of()).metadata.is_function_calling_model


def test_the_message_of_a_plain_answer_is_plain() -> None:
    message = ChatSpecCache(runtime=runtime_of()).invoke("Who?")
    assert isinstance(message, AIMessage)
    assert (message.tool_calls, message.invalid_tool_calls, message.additional_kwargs) == ([], [], {})
