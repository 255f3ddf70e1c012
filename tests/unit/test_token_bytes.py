"""The bytes behind tokens, joined: the text, whatever the tokens cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from speccache_rag.prompt.token_bytes import TokenBytes
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.add_tokens(["<ünd>"])
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: pieces with a mark for the space, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "é"]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def joined(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    spelled = TokenBytes(tokenizer)
    return b"".join(spelled.of(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)).decode()


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_tokens_join_to_the_text(byte_level: PreTrainedTokenizerFast, text: str) -> None:
    assert joined(byte_level, text) == text


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_byte_fallback_tokens_join_to_the_text(byte_fallback: PreTrainedTokenizerFast, text: str) -> None:
    if "<" in text:
        text = text.replace("<", "")  # it could spell a token of the vocabulary
    assert joined(byte_fallback, text) == text


def test_a_partial_character_has_its_own_bytes(byte_level: PreTrainedTokenizerFast) -> None:
    ids = byte_level.encode("🚀")
    assert len(ids) > 1
    assert [TokenBytes(byte_level).of(token_id) for token_id in ids] != ["\ufffd".encode()] * len(ids)


def test_added_tokens_are_their_text(byte_level: PreTrainedTokenizerFast) -> None:
    assert joined(byte_level, "a<ünd><|im_end|>b") == "a<ünd><|im_end|>b"
