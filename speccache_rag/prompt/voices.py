"""`Voices`: one tokenizer's ways to read text, which differ in control tokens and in what a seam means.

SentencePiece tokenizers put a space in front of what they are given, as if a word began there. A prompt is given to
them in pieces, and behind a seam no word begins: there the rule is off.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from speccache_rag.errors import ConfigurationError, PromptError
from speccache_rag.prompt.control import looks_like_control
from speccache_rag.types import Offsets, Spans

Encoded = tuple[tuple[int, ...], Offsets]
"""Token ids [T] and offsets [T, 2]."""


class Voices:
    """A tokenizer's backend in several copies. Safe to use from many threads.

    What tells the copies apart is state, and changing state while another thread encodes raises "Already borrowed".

    Raises:
        ConfigurationError: the tokenizer cannot spell its own control tokens as text, or loses where words begin.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.update(truncation=None, padding=None)
        bos = tokenizer.bos_token_id
        first = Tokenizer.from_str(json.dumps(state)).encode("a").ids[:1]
        self.bos = bos if isinstance(bos, int) and first == [bos] else None
        """BOS, where the tokenizer itself puts it in front of plain text."""
        # It adds BOS, and trims white space off the offsets, which alignment needs.
        state["post_processor"] = None
        for token in state["added_tokens"]:
            token["special"] |= looks_like_control(token["content"])
        control = {token["content"]: int(token["id"]) for token in state["added_tokens"] if token["special"]}
        self._control_ids = frozenset(control.values())
        self._template = Tokenizer.from_str(json.dumps(state))
        spelling = _able_to_spell(state, control, tokenizer)
        self._first = _text_voice(spelling)
        """For text at the beginning of a prompt."""
        self._text = self._first
        """For text behind other text."""
        self._behind_control = self._first
        """For text behind a control token."""
        if _drop_prefix_rule(spelling):
            self._text = _text_voice(spelling)
            _verify_seams(self._first, self._text, tokenizer)
            if not _adds_prefix_behind_control(self._template, self._first, control):
                self._behind_control = self._text

    def text(self, text: str) -> Encoded:
        """Text that stands behind other text and holds no control token, whatever it spells.

        Raises:
            PromptError: it is not valid Unicode.
        """
        return _encode(self._text, text)

    def template(self, text: str, spelled: Spans = (), *, first: bool = True) -> Encoded:
        """Text in which control tokens are control tokens, but for those in `spelled`.

        Args:
            text: the whole prompt, or a piece of it.
            spelled: places in `text`, as in `Rendered`.
            first: whether the prompt begins with it.

        Raises:
            PromptError: it is not valid Unicode.
        """
        ids, offsets = _encode(self._template, _masked(text, spelled))
        if not spelled and (first or self._text is self._first):
            return ids, offsets
        pieces: list[Encoded] = []
        cursor, voice = 0, self._first if first else self._text
        for token_id, (start, end) in [*zip(ids, offsets.tolist(), strict=True), (None, (len(text), len(text)))]:
            if token_id is not None and token_id not in self._control_ids:
                continue
            if start > cursor:
                piece_ids, piece_offsets = _encode(voice, text[cursor:start])
                pieces.append((piece_ids, piece_offsets + np.int32(cursor)))
            if token_id is not None:
                pieces.append(((token_id,), np.array([[start, end]], dtype=np.int32)))
            cursor, voice = end, self._behind_control
        return joined(pieces)


@dataclass(frozen=True)
class _Vocabulary:
    """The model's pieces in a tokenizer's state, whatever its kind."""

    model: dict[str, Any]

    def rename(self, names: Mapping[str, str]) -> None:
        """Give pieces other names, under their ids; what merged to one, or one with others, no longer does."""
        vocab = self.model["vocab"]
        if isinstance(vocab, list):
            self.model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
            return
        self.model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
        pairs = [(tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1))) for m in self.model.get("merges", ())]
        kept = [list(pair) for pair in pairs if not {*pair, "".join(pair)} & set(names)]
        if "merges" in self.model:
            self.model["merges"] = kept


def joined(pieces: Iterable[Encoded]) -> Encoded:
    """Pieces one behind another; their offsets are the prompt's already."""
    pieces = list(pieces)
    ids = tuple(token_id for piece_ids, _ in pieces for token_id in piece_ids)
    return ids, np.concatenate([np.zeros((0, 2), dtype=np.int32), *(offsets for _, offsets in pieces)])


def _masked(text: str, spelled: Spans) -> str:
    for start, end in spelled:
        text = text[:start] + "x" * (end - start) + text[end:]
    return text


def _encode(backend: Tokenizer, text: str) -> Encoded:
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


def _text_voice(state: Mapping[str, Any]) -> Tokenizer:
    voice = Tokenizer.from_str(json.dumps(state))
    voice.encode_special_tokens = True
    return voice


def _able_to_spell(
    state: dict[str, Any], control: Mapping[str, int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The state with which text that spells a control token is read as text.

    A SentencePiece vocabulary holds control tokens as pieces like any other, which text would be made of: they get
    names there that nobody can know.
    """
    spelling: dict[str, Any] = json.loads(json.dumps(state))
    if spelled := _spelled(_text_voice(spelling), control, tokenizer):
        names = {content: f"{content}{secrets.token_hex(16)}" for content in spelled if len(content) > 1}
        _Vocabulary(spelling["model"]).rename(names)
        for token in spelling["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        spelled = _spelled(_text_voice(spelling), control, tokenizer)
    if spelled:
        raise ConfigurationError(
            f"The tokenizer of {tokenizer.name_or_path!r} cannot spell {spelled[0]!r} as plain text.",
            hint="Retrieved text could then hold control tokens. Use a model with a byte-level BPE tokenizer.",
        )
    return spelling


def _spelled(text: Tokenizer, control: Mapping[str, int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The control tokens that text turns into by spelling them."""
    return [
        content
        for content, token_id in control.items()
        if token_id != tokenizer.unk_token_id and token_id in text.encode(content, add_special_tokens=False).ids
    ]


def _drop_prefix_rule(state: Mapping[str, Any]) -> bool:
    """Take from a tokenizer's state whatever puts a space in front of text; returns whether there was any."""
    found = False
    for step in (*_steps(state["normalizer"]), *_steps(state["pre_tokenizer"])):
        for name, off in _PREFIX_RULES.get(step["type"], {}).items():
            found |= step[name] != off
            step[name] = off
    return found


_PREFIX_RULES: Mapping[str, Mapping[str, object]] = {
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}
"""Steps that may put a space in front, and the option that says so, switched off."""


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A step of a tokenizer's state, or the steps of a sequence."""
    if step is None:
        return
    inner = step.get("normalizers", step.get("pretokenizers"))
    if inner is None:
        yield step
    for each in inner or ():
        yield from _steps(each)


def _verify_seams(first: Tokenizer, text: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that needs its rule for more than the beginning, as those that split at white space do."""
    if text.encode(" two words\nand more").ids != first.encode("two words\nand more").ids:
        raise ConfigurationError(
            f"The tokenizer of {tokenizer.name_or_path!r} drops white space; prompts cannot be put together of pieces.",
            hint="Use a model whose tokenizer gives back the text it was given.",
        )


def _adds_prefix_behind_control(template: Tokenizer, first: Tokenizer, control: Mapping[str, int]) -> bool:
    probe = first.encode("two words").ids
    return any(template.encode(f"{content}two words").ids == [number, *probe] for content, number in control.items())
