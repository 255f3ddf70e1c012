"""`Rendered`: a prompt's text, and where it only spells control tokens; `Disguise` keeps track of the latter.

A chat template writes control tokens, and puts texts between them that may spell the same ones: a document about chat
templates, or a user who wants to end a turn early. Once rendered, the two look alike.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccache_rag.types import Spans


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. Where it spells a control token within `spelled`, it means the text."""

    text: str
    spelled: Spans = ()


class Disguise:
    """Control tokens that the texts of one chat spell, hidden from its template and shown again behind it.

    Each is replaced by a word that no text holds, so a template neither acts on it nor hides it among its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._word = f"spelled{secrets.token_hex(8)}x"
        self._spelled: list[str] = []
        tokens = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in tokens if token.special]
        self._special = _any_of(special)
        self._control = _any_of([*special, *(t.content for t in tokens if looks_like_control(t.content))])

    def hide(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message, a tool or a document, with every control token hidden that one of its texts spells.

        Of what the assistant said, only special tokens: reasoning and tool calls are written with the others, and
        templates look for them there.
        """
        pattern = self._special if message.get("role") == "assistant" else self._control
        return {name: value if name == "role" else self._hide(value, pattern) for name, value in message.items()}

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {name: self._hide(inner, pattern) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(inner, pattern) for inner in value]
        return value

    def _replace(self, found: re.Match[str]) -> str:
        self._spelled.append(found[0])
        return f"{self._word}{len(self._spelled) - 1}."

    def show(self, rendered: str) -> Rendered:
        """The rendered prompt as it would be without the disguise, and where it has been lifted."""
        text, spelled, cursor = "", [], 0
        for word in re.finditer(rf"{self._word}(\d+)\.", rendered):
            text += rendered[cursor : word.start()]
            spelled.append((len(text), len(text) + len(self._spelled[int(word[1])])))
            text += self._spelled[int(word[1])]
            cursor = word.end()
        return Rendered(text + rendered[cursor:], tuple(spelled))


def looks_like_control(content: str) -> bool:
    """Whether an added token is a control token though nobody marked it special, such as <tool_call>."""
    return len(content) > 2 and content[0] + content[-1] in ("<>", "[]")


def _any_of(contents: list[str]) -> re.Pattern[str]:
    # The longest first, as tokenizers take them; with none, what never matches.
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or r"(?!)")
