"""Chat templates: from messages to a prompt that shows every text in them to the model.

Templates differ. Some refuse a role, or two turns of one role in a row; some leave out roles they do not know, without
a word; some write tool results as JSON, where no chunk would be found again; some know nothing of tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speccache_rag.errors import PromptError
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.control import Disguise, Rendered

Turn = dict[str, Any]
"""{"role": ..., "content": ...}; an assistant's may hold "tool_calls" in OpenAI's shape and "reasoning_content"."""

CONTEXT_MARK = "\u2063context\u2063"
"""Stands for retrieved context while a prompt is rendered; no prompt holds it."""

_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
"""What a template raises about messages it does not take."""

_Shape = tuple[str, bool, tuple[int, ...]]
"""What decides whether a template takes a turn: its role, whether it has text, and the id length of each tool call."""

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate:
    """The chat template of one tokenizer. Safe to use from many threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lost = lru_cache(maxsize=1024)(self._try)
        self._shows_tools = lru_cache(maxsize=8)(self._try_tools)

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return bool(self._tokenizer.chat_template) and self._shows_tools(str(self._tokenizer.chat_template))

    def render(self, chat: Chat | Sequence[Mapping[str, Any]]) -> str:
        """The text of `rendered`.

        Raises:
            PromptError: as there.
        """
        return self.rendered(chat).text

    def rendered(self, chat: Chat | Sequence[Mapping[str, Any]]) -> Rendered:
        """The prompt of a chat, up to where the answer begins.

        Raises:
            PromptError: the tokenizer has no chat template, its template refuses these messages or leaves their tools
                out, or one of the messages holds something other than text.
        """
        name = self._tokenizer.name_or_path
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        if not self._tokenizer.chat_template:
            raise PromptError(
                f"The tokenizer of {name!r} has no chat template.",
                hint="Pass a plain string as the prompt (in LangChain: use SpecCacheCompletion), or use an "
                "instruction-tuned model.",
            )
        if chat.tools and not self.knows_tools:
            raise PromptError(
                f"The chat template of {name!r} does not tell the model of tools.",
                hint="Use a model that was trained to call tools, such as Qwen2.5-Instruct, or pass no tools.",
            )
        try:
            disguise = Disguise(self._tokenizer)
            turns = self.fit([disguise.hide(_with_text(message)) for message in chat.messages])
            tools = [disguise.hide(tool) for tool in chat.tools]
            return disguise.show(self._apply(turns, tools=tools or None, **chat.template_kwargs))
        except _REFUSALS as error:
            raise PromptError(
                f"The chat template refuses these messages: {error}.",
                hint='Pass {"role": ..., "content": ...} each, and check their roles and their order.',
            ) from error

    def fit(self, turns: Sequence[Turn]) -> list[Turn]:
        """The same texts in turns that the template shows word for word, changed as little as that takes.

        In this order: tool results become user turns; tool calls become text; neighbours of one role become one turn;
        system turns become user turns. What a template refuses whatever is changed is returned all the same: its own
        error says best what is wrong. An assistant's reasoning is the template's to show or to leave out.

        Raises:
            PromptError: the template leaves a text out without a word.
        """
        fitted = list(turns)
        if not all(map(_is_plain, turns)):
            return fitted
        lost = self._lost_of(fitted)
        for change in (_tools_as_user, _calls_as_text, _merged, _system_as_user):
            if not lost and lost is not None:
                return fitted
            fitted = change(fitted)
            lost = self._lost_of(fitted)
        if lost:
            raise PromptError(
                f"The chat template leaves out what these roles say: {', '.join(sorted(set(lost)))}.",
                hint="Use system, user, assistant and tool.",
            )
        return fitted

    def _lost_of(self, turns: Sequence[Turn]) -> tuple[str, ...] | None:
        # The template is part of the question, for it may be replaced on a live tokenizer.
        return self._lost(str(self._tokenizer.chat_template), tuple(map(_shape, turns)))

    def _try(self, template: str, shapes: tuple[_Shape, ...]) -> tuple[str, ...] | None:
        """Roles whose text is not shown as it is; None where the template refuses these roles or their order."""
        probes = [_probe(index, shape) for index, shape in enumerate(shapes)]
        try:
            shown = self._apply([turn for turn, _ in probes])
        except _REFUSALS:
            return None
        return tuple(str(turn["role"]) for turn, marks in probes if any(mark not in shown for mark in marks))

    def _try_tools(self, template: str) -> bool:
        try:
            return "probe_of_tools" in self._apply([{"role": "user", "content": "?"}], tools=[_PROBE_TOOL])
        except _REFUSALS:
            return False

    def _apply(self, turns: list[Turn], **variables: Any) -> str:
        # The caller's variables may not undo what makes a rendered prompt one.
        fixed = {"tokenize": False, "add_generation_prompt": True}
        return str(self._tokenizer.apply_chat_template(turns, **{**variables, **fixed}))


def text_before(rendered: str, mark: str) -> str | None:
    """What a rendered prompt holds in front of `mark`; None where it does not hold the mark."""
    before, found, _ = rendered.partition(mark)
    return before if found else None


def article(noun: str) -> str:
    """What an error message puts in front of a role."""
    return "An" if noun.startswith(("a", "e", "i", "o")) else "A"


def call_as_text(name: str, arguments: Any) -> str:
    """A tool call in the notation of Hermes and Qwen; no notation is common to all models."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=str)
    return f"<tool_call>\n{body}\n</tool_call>"


def _shape(turn: Turn) -> _Shape:
    return turn["role"], bool(turn["content"]), tuple(len(str(call.get("id") or "")) for call in _calls(turn))


def _calls(turn: Turn) -> list[Mapping[str, Any]]:
    return list(turn.get("tool_calls") or ())


def _probe(index: int, shape: _Shape) -> tuple[Turn, list[str]]:
    """A turn of that shape, and what a template must show of it."""
    role, has_text, id_lengths = shape
    text = f'<{index}"\n{index}>' if has_text else ""  # JSON would escape the quote and the line end
    turn: Turn = {"role": role, "content": text}
    marks = [text] if text else []
    calls = []
    for number, length in enumerate(id_lengths):
        name = f"call_{index}_{number}"
        function = {"name": name, "arguments": {"key": f"argument_{index}_{number}"}}
        calls.append({"id": "a" * length, "type": "function", "function": function})
        marks += [name, f"argument_{index}_{number}"]
    return ({**turn, "tool_calls": calls} if calls else turn), marks


def _with_text(message: Mapping[str, Any]) -> Turn:
    """A message whose content is text: of a list of text parts, as OpenAI's clients send them, their lines."""
    message = dict(message)  # TypeError and ValueError of what is no message are the caller's to tell
    if message.get("content") is None and message.get("tool_calls"):
        message["content"] = ""  # as OpenAI's clients send a turn that only calls tools
    parts = message.get("content")
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        return message
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        role = str(message.get("role"))
        raise PromptError(
            f"{article(role)} {role} message holds something other than text: {str(parts)[:80]}.",
            hint="Drop it, or turn it into text first.",
        )
    return {**message, "content": "\n".join(texts)}


def _is_plain(turn: Turn) -> bool:
    if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
        return False
    return all(isinstance(call, Mapping) and "name" in (call.get("function") or ()) for call in _calls(turn))


def _tools_as_user(turns: Sequence[Turn]) -> list[Turn]:
    def as_user(turn: Turn) -> Turn:
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}

    return [as_user(turn) if turn["role"] == "tool" else turn for turn in turns]


def _calls_as_text(turns: Sequence[Turn]) -> list[Turn]:
    def as_text(turn: Turn) -> Turn:
        functions = [call["function"] for call in _calls(turn)]
        texts = [call_as_text(function["name"], function.get("arguments")) for function in functions]
        rest = {name: value for name, value in turn.items() if name != "tool_calls"}
        return {**rest, "content": "\n".join([*filter(None, [turn["content"]]), *texts])}

    return [as_text(turn) if _calls(turn) else turn for turn in turns]


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    groups = groupby(turns, key=lambda turn: turn["role"])
    return [{"role": role, "content": "\n\n".join(turn["content"] for turn in group)} for role, group in groups]


def _system_as_user(turns: Sequence[Turn]) -> list[Turn]:
    return _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])
