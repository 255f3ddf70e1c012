"""Turn a prompt string with matched chunks into token ids, piece by piece."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from speccache_rag.errors import ConfigurationError, EmptyChunk, PromptError
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before
from speccache_rag.types import AssembledPrompt, ChunkMatch, Offsets, Placement

logger = logging.getLogger(__name__)


def _clock(ahead: timedelta) -> dict[str, Any]:
    """The variable by which templates ask for the time, as it will be."""
    return {"strftime_now": lambda format_: (datetime.now() + ahead).strftime(format_)}


_OTHER_CLOCKS = (_clock(timedelta(days=400, hours=13, minutes=13, seconds=17)), _clock(timedelta(days=45, hours=7)))
"""Two, because one may show the same weekday or the same half of the day."""


class PromptTokenizer:
    """The target tokenizer, as prompts need it: one voice for templates, one for retrieved text.

    Template text may hold control tokens; retrieved text never does, whatever it spells. The two voices are two
    private copies of the tokenizer's backend, because the switch between them is state, and changing state while
    another thread encodes raises "Already borrowed". Safe to use from many threads.

    Raises:
        ConfigurationError: the tokenizer is not a fast one (no character offsets), or cannot spell its own control
            tokens as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ConfigurationError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it gives no character offsets.",
                hint="Use a model whose folder holds a tokenizer.json.",
            )
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer)
        self._template_voice, self._text_voice, self._bos = _two_voices(tokenizer)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer this was made from."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""
        return bool(self._tokenizer.chat_template)

    def chunk_tokens(self, text: str) -> tuple[tuple[int, ...], Offsets]:
        """Token ids [T] and offsets [T, 2] of a chunk's stripped text, in which nothing is a control token.

        Raises:
            EmptyChunk: the text is empty or white space.
            PromptError: the text is not valid Unicode.
        """
        if not text.strip():
            raise EmptyChunk(f"The chunk text {text!r} is empty.")
        return _encode(self._text_voice, text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of template text; control tokens in it are control tokens."""
        return _encode(self._template_voice, text)[0]

    def render(self, chat: Chat | Sequence[Mapping[str, Any]]) -> str:
        """The prompt string of a chat, up to where the answer begins; every text in it as it is (`ChatTemplate`).

        Raises:
            PromptError: the tokenizer has no chat template, or its template refuses these messages.
        """
        return self._chat.render(chat)

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
        return text_before(self.render(asked), CONTEXT_MARK) or ""

    def assemble(self, text: str, matches: Sequence[ChunkMatch], *, add_bos: bool = False) -> AssembledPrompt:
        """Join the stored tokens of matched chunks and the tokens of the text between them.

        Args:
            text: the rendered prompt.
            matches: in prompt order, without overlaps, as `ChunkIndex.find` gives them.
            add_bos: begin with BOS if the tokenizer itself would and the text does not spell it already; for prompts
                that no chat template has rendered.

        Raises:
            PromptError: the text is not valid Unicode.
            ValueError: a match overlaps the one before, or its text is not there.
        """
        spelled = bool(self._tokenizer.bos_token) and text.startswith(str(self._tokenizer.bos_token))
        ids: list[int] = [self._bos] if add_bos and self._bos is not None and not spelled else []
        offsets = [np.zeros((len(ids), 2), dtype=np.int32)]
        placements = []
        cursor = 0

        def append_fresh(end: int) -> None:
            if end > cursor:
                piece_ids, piece_offsets = _encode(self._template_voice, text[cursor:end])
                ids.extend(piece_ids)
                offsets.append(piece_offsets + np.int32(cursor))

        for match in matches:
            _verify(match, text, cursor)
            append_fresh(match.char_start)
            placements.append(Placement(match.chunk, len(ids), match.n_tokens))
            ids.extend(match.chunk.token_ids[: match.n_tokens])
            offsets.append(match.chunk.offsets[: match.n_tokens] + np.int32(match.char_start))
            cursor = match.char_end
        append_fresh(len(text))
        return AssembledPrompt(text, tuple(ids), np.concatenate(offsets), tuple(placements))


def _verify(match: ChunkMatch, text: str, cursor: int) -> None:
    if match.char_start < cursor:
        raise ValueError(f"the match at character {match.char_start} begins before {cursor}, where the last one ends")
    if text[match.char_start : match.char_end] != match.chunk.text[: match.char_end - match.char_start]:
        raise ValueError(f"the prompt does not hold the matched chunk at character {match.char_start}")


def _encode(backend: Tokenizer, text: str) -> tuple[tuple[int, ...], Offsets]:
    try:
        text.encode()  # the backend's own complaint about a lone surrogate says nothing
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text is not valid Unicode: {error}.", hint="Decode the source with errors='replace'."
        ) from error
    encoding = backend.encode(text, add_special_tokens=False)
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return tuple(encoding.ids), _without_gaps(offsets, len(text))


def _without_gaps(offsets: Offsets, n_chars: int) -> Offsets:
    """Every character belongs to a token: one that none claims, to the tokens before it, and before all to the first.

    A tokenizer that composes its text (NFC: Qwen) does not claim the combining mark that it made part of a letter; one
    that cannot spell every byte (SmolLM2) drops what it cannot.
    """
    if len(offsets):
        starts, ends = offsets.T
        starts[starts == starts[0]] = 0
        following = np.append(starts, np.int32(n_chars))[np.searchsorted(starts, starts, side="right")]
        np.maximum(ends, following, out=ends)
    return offsets


def _two_voices(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, Tokenizer, int | None]:
    """Private backends for template text and for retrieved text, and the BOS id where plain text gets one."""
    source = tokenizer.backend_tokenizer.to_str()
    state = json.loads(source)
    for token in state["added_tokens"]:
        # Some control tokens, such as <tool_call>, are added without being marked special.
        token["special"] |= _looks_like_control(token["content"])
    template, text = Tokenizer.from_str(source), Tokenizer.from_str(json.dumps(state))
    template.encode_special_tokens, text.encode_special_tokens = False, True
    for voice in (template, text):
        voice.no_truncation()
        voice.no_padding()
    first, bos = template.encode("a").ids[:1], tokenizer.bos_token_id
    for voice in (template, text):
        # It adds BOS, which `assemble` does itself, and trims white space off the offsets, which alignment needs.
        voice.post_processor = None
    _verify_spelling(text, {t["content"]: t["id"] for t in state["added_tokens"] if t["special"]}, tokenizer)
    return template, text, bos if isinstance(bos, int) and first == [bos] else None


def _looks_like_control(content: str) -> bool:
    return len(content) > 2 and content[0] + content[-1] in ("<>", "[]")


def _verify_spelling(text: Tokenizer, control: Mapping[str, int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose vocabulary turns the spelling of a control token into that token."""
    for content, token_id in control.items():
        if token_id != tokenizer.unk_token_id and token_id in text.encode(content, add_special_tokens=False).ids:
            raise ConfigurationError(
                f"The tokenizer of {tokenizer.name_or_path!r} cannot spell {content!r} as plain text.",
                hint="Retrieved text could then hold control tokens. Use a model with a byte-level BPE tokenizer.",
            )
