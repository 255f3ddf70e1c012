"""From LangChain messages to turns, and turns fitted to chat templates of every temper."""

from __future__ import annotations

import itertools

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
from transformers import PreTrainedTokenizerFast

from langchain_speccache.messages import Turn, as_turns
from langchain_speccache.templates import fit
from speccache_rag.errors import PromptError
from tests.tiny import tiny_tokenizer

CALL = {"name": "search", "args": {"query": "Zürich"}, "id": "1"}
CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "Zürich"}}\n</tool_call>'


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
    assert turn(message) == {"role": role, "content": "text"}


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


def test_tool_calls_are_written_behind_the_text() -> None:
    assert turn(AIMessage("Let me look.", tool_calls=[CALL]))["content"] == f"Let me look.\n{CALLED}"
    assert turn(AIMessage("", tool_calls=[CALL]))["content"] == CALLED


def test_a_call_that_stands_in_the_content_too_is_written_once() -> None:
    blocks = [{"type": "text", "text": "Let me look."}, {"type": "tool_call", **CALL}]
    assert turn(AIMessage(blocks, tool_calls=[CALL]))["content"] == f"Let me look.\n{CALLED}"


def test_a_call_that_could_not_be_read_is_not_lost() -> None:
    broken = {"name": "search", "args": '{"query": ', "id": "1", "error": None}
    assert '{"query": ' in turn(AIMessage("", invalid_tool_calls=[broken]))["content"].replace("\\", "")


# Templates. Each is the essence of one that a known family of models has.

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (  # Mistral: user and assistant take turns, after one system turn at most
    "{% set chat = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% for m in chat %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% endfor %}" + CHATML
)
WITHOUT_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ALTERNATING
SILENT = (  # Zephyr: a role it does not know is left out
    "{% for m in messages %}{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "<|{{ m['role'] }}|>\n{{ m['content'] }}\n{% endif %}{% endfor %}"
)
AS_JSON = (  # Llama 3.1: tool results become JSON strings
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['role'] == 'tool' %}{{ m['content'] | tojson }}{% else %}{{ m['content'] | trim }}{% endif %}\n"
    "{% endfor %}"
)
NEVER = "{{ raise_exception('nothing is good enough') }}"

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Who?"}
CALLING = {"role": "assistant", "content": CALLED}
RESULT = {"role": "tool", "content": "First line,\nsecond line."}
RESULT_AS_USER = {"role": "user", "content": "<tool_response>\nFirst line,\nsecond line.\n</tool_response>"}
AGENT = [SYSTEM, ASKED, CALLING, RESULT]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def fitted(base: PreTrainedTokenizerFast, template: str, turns: list[Turn]) -> list[Turn]:
    base.chat_template = template
    return fit(turns, base)


def test_a_template_that_takes_all_gets_all(base: PreTrainedTokenizerFast) -> None:
    turns = [*AGENT, RESULT, ASKED, ASKED]
    assert fitted(base, CHATML, turns) == turns


@pytest.mark.parametrize("template", [ALTERNATING, SILENT, AS_JSON], ids=["refused", "left out", "escaped"])
def test_tool_results_become_user_turns_where_the_template_would_not_show_them(
    base: PreTrainedTokenizerFast, template: str
) -> None:
    assert fitted(base, template, AGENT) == [SYSTEM, ASKED, CALLING, RESULT_AS_USER]


def test_neighbours_are_merged_where_roles_must_alternate(base: PreTrainedTokenizerFast) -> None:
    doubled = [SYSTEM, SYSTEM, ASKED, ASKED, CALLING, CALLING, RESULT, RESULT]
    assert [turn["role"] for turn in fitted(base, ALTERNATING, doubled)] == ["system", "user", "assistant", "user"]
    assert fitted(base, ALTERNATING, doubled)[1]["content"] == "Who?\n\nWho?"


def test_the_system_turn_joins_the_users_where_there_is_none(base: PreTrainedTokenizerFast) -> None:
    assert fitted(base, WITHOUT_SYSTEM, [SYSTEM, ASKED]) == [{"role": "user", "content": "Be brief.\n\nWho?"}]


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, WITHOUT_SYSTEM, SILENT, AS_JSON])
def test_no_text_is_lost(base: PreTrainedTokenizerFast, template: str) -> None:
    for middle in itertools.product(["user", "tool", "assistant"], repeat=3):
        turns = [
            {"role": role, "content": f'Text "{n}"\nof the {role}.'}
            for n, role in enumerate(["system", "user", *middle, "user"])
        ]
        shown = base.apply_chat_template(fitted(base, template, turns), tokenize=False, add_generation_prompt=True)
        assert [turn for turn in turns if turn["content"] not in shown] == []


def test_what_nothing_makes_fit_is_left_to_the_templates_own_error(base: PreTrainedTokenizerFast) -> None:
    assert fitted(base, NEVER, [ASKED]) == [ASKED]
