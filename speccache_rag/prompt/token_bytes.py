"""The bytes behind each token: a character of several tokens has no text in any of them, but each has its bytes."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class TokenBytes:
    """Token ids to bytes, for byte-level BPE (GPT-2, Llama 3, Qwen) and byte fallback (Llama 2, Mistral, Gemma)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.backend_tokenizer.decoder
        self._kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}

    def of(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if "ByteLevel" in self._kinds and all(letter in _letters() for letter in token):
            return bytes(_letters()[letter] for letter in token)
        if "ByteFallback" in self._kinds:
            found = _BYTE_TOKEN.match(token)
            return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()


def _kinds(decoder: Any) -> set[str]:
    """Types of a decoder and of all in its sequence."""
    return {decoder["type"]}.union(*(_kinds(inner) for inner in decoder.get("decoders", ())))


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """GPT-2's letter for each byte, inverted: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
