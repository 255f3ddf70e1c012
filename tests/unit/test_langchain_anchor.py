"""`anchor_for`: what a chain's prompt holds in front of retrieved context."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_speccache import ChatSpecCache, SpecCacheCompletion, anchor_for
from speccache_rag.errors import PromptError
from tests.tiny import tiny_tokenizer
from tests.unit.fake_runtime import FakeRuntime

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "As {role}:\n\n{context}\n\nBe brief."), ("placeholder", "{history}"), ("human", "{input}")]
)
VALUES = {"role": "a guide", "input": "Why?", "context": "Page 1", "history": [("human", "Hello"), ("ai", "Hello.")]}


def test_it_is_the_start_of_the_chains_prompt(tmp_path: Path) -> None:
    runtime = FakeRuntime(tokenizer=tiny_tokenizer(tmp_path))
    (PROMPT.partial(role="a guide") | ChatSpecCache(runtime=runtime)).invoke(VALUES)
    sent = runtime.tokenizer.apply_chat_template(runtime.calls[0][0], tokenize=False, add_generation_prompt=True)
    anchor = anchor_for(runtime.tokenizer, PROMPT.partial(role="a guide"))
    assert anchor == "<|im_start|>system\nAs a guide:\n\n"
    assert sent.startswith(f"{anchor}Page 1")


def test_a_text_prompt_goes_through_no_chat_template(tmp_path: Path) -> None:
    runtime = FakeRuntime(tokenizer=tiny_tokenizer(tmp_path))
    prompt = PromptTemplate.from_template("Read this.\n{pages}\nQ: {input}\nA:")
    (prompt | SpecCacheCompletion(runtime=runtime)).invoke({"pages": "Page 1", "input": "Why?"})
    anchor = anchor_for(runtime.tokenizer, prompt, variable="pages")
    assert anchor == "Read this.\n"
    assert runtime.calls[0][0].startswith(f"{anchor}Page 1")


def test_required_history_is_left_empty(tmp_path: Path) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Read this."), ("human", "{context}")])
    longer = ChatPromptTemplate.from_messages([prompt.messages[0], *PROMPT.messages[1:2], prompt.messages[1]])
    longer.messages[1].optional = False
    longer = ChatPromptTemplate(longer.messages)
    assert "history" in longer.input_variables
    tokenizer = tiny_tokenizer(tmp_path)
    assert anchor_for(tokenizer, longer) == anchor_for(tokenizer, prompt)


def test_a_prompt_without_context_has_no_anchor(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"does not place 'pages'; its variables are \['context', 'input', 'role'\]"):
        anchor_for(tiny_tokenizer(tmp_path), PROMPT, variable="pages")


def test_a_chat_prompt_needs_a_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="has no chat template"):
        anchor_for(tokenizer, PROMPT)


def test_the_prompt_is_fitted_to_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    assert anchor_for(tokenizer, PROMPT.partial(role="a guide")) == "<|im_start|>user\nAs a guide:\n\n"
