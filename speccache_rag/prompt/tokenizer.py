"""Turn a prompt string with matched chunks into token ids, piece by piece."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from speccache_rag.errors import ConfigurationError, EmptyChunk
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.control import Rendered
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before
from speccache_rag.prompt.voices import Encoded, Voices, joined
from speccache_rag.types import AssembledPrompt, ChunkMatch, Placement

logger = logging.getLogger(__name__)


def _clock(ahead: timedelta) -> dict[str, Any]:
    """The variable by which templates ask for the time, as it will be."""
    return {"strftime_now": lambda format_: (datetime.now() + ahead).strftime(format_)}


_OTHER_CLOCKS = (_clock(timedelta(days=400, hours=13, minutes=13, seconds=17)), _clock(timedelta(days=45, hours=7)))
"""Two, because one may show the same weekday or the same half of the day."""


class PromptTokenizer:
    """The target tokenizer, as prompts need it: one voice for templates, one for retrieved text.

    A chat template's own text holds control tokens. The texts of messages and chunks never do, whatever they spell,
    and known or not; a prompt given as one string is the caller's to write, and its control tokens are taken as such.
    Safe to use from many threads.

    Raises:
        ConfigurationError: the tokenizer is not a fast one (no character offsets), cannot spell its own control tokens
            as text, or drops white space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ConfigurationError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it gives no character offsets.",
                hint="Use a model whose folder holds a tokenizer.json.",
            )
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer)
        self._voices = Voices(tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer this was made from."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""
        return bool(self._tokenizer.chat_template)

    def chunk_tokens(self, text: str) -> Encoded:
        """Token ids [T] and offsets [T, 2] of a chunk's stripped text behind other text; none is a control token.

        Raises:
            EmptyChunk: the text is empty or white space.
            PromptError: the text is not valid Unicode.
        """
        if not text.strip():
            raise EmptyChunk(f"The chunk text {text!r} is empty.")
        return self._voices.text(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of template text; control tokens in it are control tokens."""
        return self._voices.template(text)[0]

    def render(self, chat: Chat | Sequence[Mapping[str, Any]]) -> Rendered:
        """The prompt of a chat, up to where the answer begins; every text in it as it is (`ChatTemplate`).

        Raises:
            PromptError: the tokenizer has no chat template, or its template refuses these messages.
        """
        return self._chat.rendered(chat)

    def header(self, template_kwargs: Mapping[str, Any] | None = None) -> str:
        """The lasting text that the chat template puts in front of a single user message; "" without a template.

        Where the template prints a date or a time, the header ends with the line before it, and a warning says so:
        what is computed behind text that changes tomorrow would be found by nobody tomorrow.
        """
        if not self.has_chat_template:
            return ""
        given = template_kwargs or {}
        now = self._header(given)
        lasting = min(
            (os.path.commonprefix([now, self._header({**clock, **given})]) for clock in _OTHER_CLOCKS), key=len
        )
        if lasting == now:
            return now
        lasting = lasting[: lasting.rfind("\n") + 1]
        logger.warning(
            "The chat template of %r prints the date or the time (%r). Chunks are captured behind the text before it, "
            "%r, so that they are found tomorrow too. For a longer header pass anchor=..., or the date as a fixed "
            "variable in chat_template_kwargs.",
            self._tokenizer.name_or_path,
            now[len(lasting) :][:60],
            lasting,
        )
        return lasting

    def _header(self, template_kwargs: Mapping[str, Any]) -> str:
        asked = Chat([{"role": "user", "content": CONTEXT_MARK}], template_kwargs=template_kwargs)
        return text_before(self._chat.render(asked), CONTEXT_MARK) or ""

    def assemble(
        self, prompt: Rendered | str, matches: Sequence[ChunkMatch], *, add_bos: bool = False
    ) -> AssembledPrompt:
        """Join the stored tokens of matched chunks and the tokens of the text between them.

        Args:
            prompt: as rendered; a plain string has no texts that only spell control tokens.
            matches: in prompt order, without overlaps, as `ChunkIndex.find` gives them.
            add_bos: begin with BOS if the tokenizer itself would and the text does not spell it already; for prompts
                that no chat template has rendered.

        Raises:
            PromptError: the text is not valid Unicode.
            ValueError: a match overlaps the one before, or its text is not there.
        """
        prompt = prompt if isinstance(prompt, Rendered) else Rendered(prompt)
        text, bos = prompt.text, self._voices.bos
        spelled = bool(self._tokenizer.bos_token) and text.startswith(str(self._tokenizer.bos_token))
        ids: list[int] = [bos] if add_bos and bos is not None and not spelled else []
        offsets = [np.zeros((len(ids), 2), dtype=np.int32)]
        placements = []
        cursor = 0

        def append(piece: Encoded, at: int) -> None:
            ids.extend(piece[0])
            offsets.append(piece[1] + np.int32(at))

        for match in matches:
            _verify(match, text, cursor)
            append(self._fresh(prompt, cursor, match.char_start), cursor)
            placements.append(Placement(match.chunk, len(ids), match.n_tokens))
            append((match.chunk.token_ids[: match.n_tokens], match.chunk.offsets[: match.n_tokens]), match.char_start)
            cursor = match.char_end
        append(self._fresh(prompt, cursor, len(text)), cursor)
        return AssembledPrompt(text, tuple(ids), np.concatenate(offsets), tuple(placements), prompt.spelled)

    def _fresh(self, prompt: Rendered, start: int, end: int) -> Encoded:
        if start == end:
            return joined([])
        inside = ((max(a, start) - start, min(b, end) - start) for a, b in prompt.spelled if a < end and b > start)
        return self._voices.template(prompt.text[start:end], tuple(inside), first=start == 0)


def _verify(match: ChunkMatch, text: str, cursor: int) -> None:
    if match.char_start < cursor:
        raise ValueError(f"the match at character {match.char_start} begins before {cursor}, where the last one ends")
    if text[match.char_start : match.char_end] != match.chunk.text[: match.char_end - match.char_start]:
        raise ValueError(f"the prompt does not hold the matched chunk at character {match.char_start}")
