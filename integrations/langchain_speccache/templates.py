"""Turns made such that a chat template shows all of them to the model.

Templates differ. Some refuse a role, or two turns of one role in a row; some leave out roles they do not know, without
a word; some write tool results as JSON, where no chunk would be found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from langchain_speccache.messages import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def fit(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    """The same texts in turns that the chat template shows word for word, changed as little as that takes.

    In this order: tool results become user turns; neighbours of one role become one turn; system turns become user
    turns. What no change makes fit is returned all the same: the template's own error says best what is wrong.
    """
    fitted = list(turns)
    for change in (_tools_as_user, _merged, _system_as_user):
        if _shows(tokenizer, fitted):
            break
        fitted = change(fitted)
    return fitted


def _shows(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> bool:
    """Whether the template renders turns of these roles, and every text in them as it is."""
    marks = [f'<{index}"\n{index}>' for index, _ in enumerate(turns)]  # JSON would escape the quote and the line end
    marked = [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)]
    try:
        shown = str(tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError):
        return False
    return all(mark in shown for mark in marks)


def _tools_as_user(turns: Sequence[Turn]) -> list[Turn]:
    def as_user(turn: Turn) -> Turn:
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}

    return [as_user(turn) if turn["role"] == "tool" else turn for turn in turns]


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    groups = groupby(turns, key=lambda turn: turn["role"])
    return [{"role": role, "content": "\n\n".join(turn["content"] for turn in group)} for role, group in groups]


def _system_as_user(turns: Sequence[Turn]) -> list[Turn]:
    return _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])
