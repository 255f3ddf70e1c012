"""Calls with tools, reasoning and time limits: what the engine is asked, and what is read out of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.vllm.frontend import versions
from speccache_rag.errors import ConfigurationError, PromptError, RequestTimeout, UnsupportedVersion
from speccache_rag.plan.call import Call
from speccache_rag.prompt.templates import ChatTemplate
from speccache_rag.types import Completion, Delta, PrefillReport, Usage
from tests.tiny import CHAT_TEMPLATE as WITH_TOOLS
from tests.tiny import tiny_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_THINKING = CHAT_TEMPLATE + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
ASKED = [{"role": "user", "content": "Who lit the fire?"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TELL = {"type": "function", "function": {"name": "tell", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def call_of(
    base: PreTrainedTokenizerFast, template: str, /, config: dict[str, Any] | None = None, **options: Any
) -> Call:
    base.chat_template = template
    return Call.of(ASKED, options, SpecCacheConfig(model="tiny", **(config or {})), base)


def written(tool: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def answered(base: PreTrainedTokenizerFast, call: Call, text: str, reason: str = "stop") -> list[Delta]:
    """What the caller gets of an answer that the model writes token by token."""
    prompt_ids = base.encode(ChatTemplate(base).render(call.prompt))

    async def source() -> AsyncGenerator[Delta, None]:
        for token_id in base.encode(text):
            yield Delta(base.decode([token_id]), token_ids=(token_id,))
        yield Delta("", Completion(text, PrefillReport(), Usage(1, 1), reason))

    async def collected() -> list[Delta]:
        return [delta async for delta in call.answer(source(), prompt_ids)]

    return asyncio.run(collected())


def whole(deltas: list[Delta]) -> Completion:
    completion = deltas[-1].completion
    assert completion is not None
    return completion


# What is read.


def test_an_answer_without_marks_is_its_text(base: PreTrainedTokenizerFast) -> None:
    call = call_of(base, CHAT_TEMPLATE, max_tokens=5)
    assert call.reader is None
    assert call.sampling == {"max_tokens": 5}
    assert whole(answered(base, call, "The keeper did.")).text == "The keeper did."


def test_tool_calls_are_read_and_streamed_apart_from_the_text(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, WITH_TOOLS, tools=[LOOK, TELL])
    text = "Let me see.\n" + written("look", '{"query": "fire"}') + "\n" + written("tell", "{}")
    deltas = answered(base, call, text)
    done = whole(deltas)
    assert done.text.strip() == "Let me see."
    assert [(c.name, json.loads(c.arguments)) for c in done.tool_calls] == [("look", {"query": "fire"}), ("tell", {})]
    assert all(c.id for c in done.tool_calls)
    assert len({c.id for c in done.tool_calls}) == 2
    assert done.finish_reason == "tool_calls"
    assert "".join(delta.text for delta in deltas) == done.text
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert len(pieces) > 4  # as they are written, not all at the end
    assert "".join(p.arguments for p in pieces if p.index == 0) == done.tool_calls[0].arguments


@pytest.mark.parametrize("arguments", ['{"query": fire}', '{"query" "fire"}', "look"])
def test_arguments_that_do_not_parse_are_the_callers_to_judge(base: PreTrainedTokenizerFast, arguments: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    done = whole(answered(base, call_of(base, WITH_TOOLS, tools=[LOOK]), written("look", arguments)))
    assert done.tool_calls[0].name == "look"
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.tool_calls[0].arguments or "none")


def test_an_answer_with_tools_may_call_none(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    done = whole(answered(base, call_of(base, WITH_TOOLS, tools=[LOOK]), "The keeper did."))
    assert (done.text, done.tool_calls, done.finish_reason) == ("The keeper did.", (), "stop")


def test_reasoning_is_apart_from_the_answer(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, WITH_THINKING)
    deltas = answered(base, call, "<think>The log says so.</think>The keeper did.")
    done = whole(deltas)
    assert (done.reasoning, done.text) == ("The log says so.", "The keeper did.")
    assert "".join(delta.reasoning for delta in deltas) == done.reasoning
    assert "".join(delta.text for delta in deltas) == done.text
    cut = whole(answered(base, call_of(base, WITH_THINKING), "<think>The log", "length"))
    assert (cut.reasoning, cut.text, cut.finish_reason) == ("The log", "", "length")


@pytest.mark.parametrize("place", ["call", "object"])
def test_thinking_can_be_switched_off(base: PreTrainedTokenizerFast, place: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    call = call_of(base, WITH_THINKING, off if place == "object" else None, **(off if place == "call" else {}))
    assert ChatTemplate(base).render(call.prompt).endswith("<think>\n\n</think>\n\n")
    done = whole(answered(base, call, "The keeper did."))
    assert (done.reasoning, done.text) == (None, "The keeper did.")


def test_a_calls_template_variables_win_over_the_objects(base: PreTrainedTokenizerFast) -> None:
    config = {"chat_template_kwargs": {"a": 1, "b": 1}, "reasoning_parser": "none"}
    call = call_of(base, WITH_THINKING, config, chat_template_kwargs={"b": 2})
    assert call.prompt.template_kwargs == {"a": 1, "b": 2}
    assert call.reader is None


def test_reasoning_and_tool_calls_in_one_answer(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, WITH_TOOLS + "{# enable_thinking #}", tools=[LOOK])
    done = whole(answered(base, call, "<think>Look.</think>\n" + written("look", '{"query": "fire"}')))
    assert (done.reasoning, done.text) == ("Look.", "")
    assert [call.name for call in done.tool_calls] == ["look"]


# What the engine is asked.


@pytest.mark.parametrize("choice", ["required", "look", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_decoded_under_a_grammar(base: PreTrainedTokenizerFast, choice: Any) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, WITH_TOOLS, tools=[LOOK, TELL], tool_choice=choice, max_tokens=9)
    assert call.sampling["max_tokens"] == 9
    grammar = str(call.sampling["structured_outputs"])
    assert "look" in grammar
    assert ("tell" in grammar) == (choice == "required")
    assert "structured_outputs" not in call_of(base, WITH_TOOLS, tools=[LOOK]).sampling


def test_before_a_forced_call_nothing_is_thought(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, WITH_TOOLS + "{# enable_thinking #}", tools=[LOOK], tool_choice="look")
    done = whole(answered(base, call, written("look", '{"query": "fire"}')))
    assert done.reasoning is None
    assert [call.name for call in done.tool_calls] == ["look"]


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [LOOK], "tool_choice": "lok"}, "tool_choice is 'lok'; the call's tools are look"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; the call's tools are none"),
        ({"tools": ["look"]}, "A tool is"),
        ({"tools": [{"type": "function", "function": {}}]}, "A tool is"),
        ({"tools": [LOOK], "tool_choice": 3}, "tool_choice is 3"),
        ({"chat_template_kwargs": "off"}, "chat_template_kwargs is 'off'"),
        ({"n": 2}, "n is 2, and one call gives one answer.*a seed each"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
    ],
)
def test_options_of_no_known_shape_are_refused(
    base: PreTrainedTokenizerFast, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call_of(base, WITH_TOOLS, **options)


def test_a_template_that_shows_no_tools_is_told_of_none(base: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    call = call_of(base, CHAT_TEMPLATE, {"tool_parser": "hermes"}, tools=[LOOK])
    with pytest.raises(PromptError, match="does not tell the model of tools"):
        ChatTemplate(base).render(call.prompt)


def test_a_notation_that_nobody_named_is_refused(base: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match="does not say how it writes tool calls.*tool_parser='hermes'"):
        call_of(base, CHAT_TEMPLATE, tools=[LOOK])


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_named(base: PreTrainedTokenizerFast, name: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    with pytest.raises(ConfigurationError, match=rf"{name} 'no_such_parser'"):
        call_of(base, WITH_TOOLS, {name: "no_such_parser"}, tools=[LOOK])


def test_tools_make_no_sense_for_a_prompt_that_is_text(base: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match="tools given, and the prompt is text"):
        Call.of("Who?", {"tools": [LOOK]}, SpecCacheConfig(model="tiny"), base)


def test_without_vllm_tools_say_what_is_missing_and_reasoning_stays_in_the_answer(
    base: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise UnsupportedVersion("vLLM is not installed.", hint="Install it.")

    monkeypatch.setattr(versions, "installed_version", missing)
    with pytest.raises(ConfigurationError, match=r"read by vLLM's parsers: vLLM is not installed\. Install it\."):
        call_of(base, WITH_TOOLS, tools=[LOOK])
    assert call_of(base, WITH_THINKING).reader is None


# Time.


@pytest.mark.parametrize("n_before", [0, 2])
def test_a_call_that_takes_too_long_is_ended_and_its_request_freed(
    base: PreTrainedTokenizerFast, n_before: int
) -> None:
    freed = []

    async def source() -> AsyncGenerator[Delta, None]:
        try:
            for _ in range(n_before):
                yield Delta("word ")
            await asyncio.sleep(60)
            yield Delta("never")
        finally:
            freed.append(True)

    async def read() -> None:
        call = call_of(base, CHAT_TEMPLATE, timeout=0.05)
        assert [delta.text async for delta in call.answer(source(), [])] == "never"

    with pytest.raises(RequestTimeout, match=r"not complete after 0\.05 s") as caught:
        asyncio.run(read())
    assert isinstance(caught.value, TimeoutError)
    assert freed == [True]


def test_the_limit_counts_from_the_submission(base: PreTrainedTokenizerFast) -> None:
    call = call_of(base, CHAT_TEMPLATE, timeout=60)
    assert call.timeout_s == 60
    late = Call(call.prompt, {}, None, 1.0, call.started - 5)
    with pytest.raises(RequestTimeout):
        answered(base, late, "The keeper did.")


def test_a_timeout_of_somebody_else_stays_theirs(base: PreTrainedTokenizerFast) -> None:
    async def source() -> AsyncGenerator[Delta, None]:
        yield Delta("word")
        raise TimeoutError("a disk")

    async def read() -> None:
        async for _ in call_of(base, CHAT_TEMPLATE, timeout=60).answer(source(), []):
            pass

    with pytest.raises(TimeoutError, match="a disk") as caught:
        asyncio.run(read())
    assert not isinstance(caught.value, RequestTimeout)
