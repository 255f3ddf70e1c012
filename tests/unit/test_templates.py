"""Messages fitted to chat templates of every temper."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from speccache_rag.errors import PromptError
from speccache_rag.prompt.templates import ChatTemplate, Turn, text_before
from speccache_rag.prompt.tokenizer import PromptTokenizer
from tests.tiny import tiny_tokenizer

# Each is the essence of one that a known family of models has.

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
CALLING = {"role": "assistant", "content": '<tool_call>\n{"name": "search"}\n</tool_call>'}
RESULT = {"role": "tool", "content": "First line,\nsecond line."}
RESULT_AS_USER = {"role": "user", "content": "<tool_response>\nFirst line,\nsecond line.\n</tool_response>"}
AGENT = [SYSTEM, ASKED, CALLING, RESULT]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def fitted(base: PreTrainedTokenizerFast, template: str, turns: list[Turn]) -> list[Turn]:
    base.chat_template = template
    return ChatTemplate(base).fit(turns)


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


def test_turns_that_say_more_than_a_text_were_written_for_this_template(base: PreTrainedTokenizerFast) -> None:
    turns: list[Any] = [{**RESULT, "name": "search"}, {"role": "tool", "content": None}]
    assert fitted(base, ALTERNATING, turns) == turns


def test_rendering_fits(base: PreTrainedTokenizerFast) -> None:
    base.chat_template = WITHOUT_SYSTEM
    prompt = ChatTemplate(base).render([SYSTEM, ASKED])
    assert prompt == "<|im_start|>user\nBe brief.\n\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_is_tried_once_for_the_same_roles(
    base: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    apply = base.apply_chat_template
    monkeypatch.setattr(base, "apply_chat_template", lambda *args, **kw: calls.append(args) or apply(*args, **kw))
    base.chat_template = WITHOUT_SYSTEM
    template = ChatTemplate(base)
    for n in range(5):
        template.render([SYSTEM, {"role": "user", "content": f"Who {n}?"}])
    assert len(calls) == 2 + 5  # the roles as they are and as they are changed, and each prompt
    base.chat_template = CHATML
    assert template.fit([SYSTEM, ASKED]) == [SYSTEM, ASKED]  # another template is tried again


@pytest.mark.parametrize("messages", [["Who?"], [{"role": "user"}], [{"content": "Who?"}], [None]])
def test_what_is_no_message_is_refused(base: PreTrainedTokenizerFast, messages: Any) -> None:
    base.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    with pytest.raises(PromptError, match="refuses these messages"):
        ChatTemplate(base).render(messages)


def test_text_before_a_mark() -> None:
    assert text_before("Read <here> and <here>", "<here>") == "Read "
    assert text_before("<here>", "<here>") == ""
    assert text_before("Read", "<here>") is None


@pytest.mark.parametrize("role", ["developer", "function", "critic"])
def test_a_role_that_a_template_leaves_out_is_an_error_and_no_lost_text(
    base: PreTrainedTokenizerFast, role: str
) -> None:
    with pytest.raises(PromptError, match=rf"leaves out what these roles say: {role}\."):
        fitted(base, SILENT, [SYSTEM, {"role": role, "content": "Important."}, ASKED])


def test_further_keys_do_not_keep_a_tool_result_from_the_model(base: PreTrainedTokenizerFast) -> None:
    turns = [ASKED, {**RESULT, "tool_call_id": "1"}]
    assert RESULT_AS_USER["content"] in fitted(base, SILENT, turns)[-1]["content"]


def test_a_template_that_breaks_is_a_refusal(base: PreTrainedTokenizerFast) -> None:
    base.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(PromptError, match="refuses these messages"):
        ChatTemplate(base).render([ASKED])


def test_a_list_of_texts_is_their_lines(base: PreTrainedTokenizerFast) -> None:
    base.chat_template = CHATML
    parts: Any = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert "user\nOne.\nTwo.<|im_end|>" in ChatTemplate(base).render([{"role": "user", "content": parts}])


def test_what_is_no_text_is_refused(base: PreTrainedTokenizerFast) -> None:
    base.chat_template = CHATML
    parts: Any = [{"type": "image_url", "image_url": {"url": "x.png"}}]
    with pytest.raises(PromptError, match="user message holds something other than text"):
        ChatTemplate(base).render([{"role": "user", "content": parts}])


class TestHeader:
    """The anchor of a template that prints what changes by itself."""

    @pytest.fixture(autouse=True)
    def tokenizer(self, base: PreTrainedTokenizerFast) -> None:
        self.base = base

    def header(self, system: str, **given: Any) -> str:
        self.base.chat_template = "<|im_start|>system\n" + system + "<|im_end|>\n" + CHATML
        return PromptTokenizer(self.base).header(given)

    @pytest.mark.parametrize("format_", ["%d %b %Y", "%A", "%H:%M", "%Y", "%I %p", "%B", "%S", "%j"])
    def test_it_ends_before_a_date_and_says_so(self, format_: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            header = self.header("Be brief.\nToday Date: {{ strftime_now('" + format_ + "') }}\nBe kind.")
        assert header == "<|im_start|>system\nBe brief.\n"
        assert len(caplog.records) == 1
        assert "prints the date or the time" in caplog.text

    def test_a_fixed_date_is_part_of_it(self, caplog: pytest.LogCaptureFixture) -> None:
        template = "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%Y') }}{% endif %}\n"
        with caplog.at_level(logging.WARNING):
            header = self.header(template, date_string="26 Jul 2024")
        assert header == "<|im_start|>system\n26 Jul 2024<|im_end|>\n<|im_start|>user\n"
        assert caplog.records == []

    def test_what_stays_is_kept_whole(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            assert self.header("Be brief.") == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        assert caplog.records == []
