"""Chat templates: from messages to a prompt that shows every text in them to the model.

Templates differ. Some refuse a role, or two turns of one role in a row; some leave out roles they do not know, without
a word; some write tool results as JSON, where no chunk would be found again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speccache_rag.errors import PromptError

Turn = dict[str, str]
"""{"role": ..., "content": ...}"""

CONTEXT_MARK = "\u2063context\u2063"
"""Stands for retrieved context while a prompt is rendered; no prompt holds it."""

_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
"""What a template raises about messages it does not take."""


class ChatTemplate:
    """The chat template of one tokenizer. Safe to use from many threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lost = lru_cache(maxsize=1024)(self._try)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt string of a chat, up to where the answer begins.

        Raises:
            PromptError: the tokenizer has no chat template, its template refuses these messages, or one of them holds
                something other than text.
        """
        if not self._tokenizer.chat_template:
            raise PromptError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} has no chat template.",
                hint="Pass a plain string as the prompt (in LangChain: use SpecCacheCompletion), or use an "
                "instruction-tuned model.",
            )
        try:
            return self._apply(self.fit([_with_text(message) for message in messages]))
        except _REFUSALS as error:
            raise PromptError(
                f"The chat template refuses these messages: {error}.",
                hint='Pass {"role": ..., "content": ...} each, and check their roles and their order.',
            ) from error

    def fit(self, turns: Sequence[Turn]) -> list[Turn]:
        """The same texts in turns that the template shows word for word, changed as little as that takes.

        In this order: tool results become user turns; neighbours of one role become one turn; system turns become
        user turns. Turns with tool calls were written for this very template, and stay as they are. What a template
        refuses whatever is changed is returned all the same: its own error says best what is wrong.

        Raises:
            PromptError: the template leaves a text out without a word.
        """
        fitted = list(turns)
        if not all(map(_is_plain, turns)):
            return fitted
        lost = self._lost_of(fitted)
        for change in (_tools_as_user, _merged, _system_as_user):
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
        return self._lost(str(self._tokenizer.chat_template), tuple(turn["role"] for turn in turns))

    def _try(self, template: str, roles: tuple[str, ...]) -> tuple[str, ...] | None:
        """Roles whose text is not shown as it is; None where the template refuses these roles or their order."""
        marks = [f'<{index}"\n{index}>' for index, _ in enumerate(roles)]  # JSON would escape the quote and line end
        try:
            shown = self._apply([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        except _REFUSALS:
            return None
        return tuple(role for role, mark in zip(roles, marks, strict=True) if mark not in shown)

    def _apply(self, turns: list[Turn]) -> str:
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def text_before(rendered: str, mark: str) -> str | None:
    """What a rendered prompt holds in front of `mark`; None where it does not hold the mark."""
    before, found, _ = rendered.partition(mark)
    return before if found else None


def _with_text(message: Mapping[str, Any]) -> Turn:
    """A message whose content is text: of a list of text parts, as OpenAI's clients send them, their lines."""
    message = dict(message)  # TypeError and ValueError of what is no message are the caller's to tell
    parts = message.get("content")
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        return message
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise PromptError(
            f"A {message.get('role')} message holds something other than text: {str(parts)[:80]}.",
            hint="Drop it, or turn it into text first.",
        )
    return {**message, "content": "\n".join(texts)}


def _is_plain(turn: Turn) -> bool:
    texts = isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
    return texts and not turn.get("tool_calls")


def _tools_as_user(turns: Sequence[Turn]) -> list[Turn]:
    def as_user(turn: Turn) -> Turn:
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}

    return [as_user(turn) if turn["role"] == "tool" else turn for turn in turns]


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    groups = groupby(turns, key=lambda turn: turn["role"])
    return [{"role": role, "content": "\n\n".join(turn["content"] for turn in group)} for role, group in groups]


def _system_as_user(turns: Sequence[Turn]) -> list[Turn]:
    return _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])
