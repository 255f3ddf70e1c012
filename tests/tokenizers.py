"""Tokenizers of every kind that decoder-only models have: real ones where a package carries them, made ones elsewhere.

What sets them apart is what stands for a space, and what they put in front of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import SentencePieceExtractor

from tests.tiny import CHAT_TEMPLATE, CORPUS, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""As Mistral 7B Instruct 0.1 has it."""

ZEPHYR_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""As TinyLlama and Zephyr have it."""

MISTRAL = files("mistral_common") / "data" / "tokenizer.model.v1"


def _mistral(*, legacy: bool) -> PreTrainedTokenizerFast:
    """Mistral's first tokenizer, of the Llama-2 kind, as Transformers converts it: the old way, or the new."""
    found = SentencePieceExtractor(str(MISTRAL)).extract(models.BPE)
    backend = Tokenizer(
        models.BPE(found["vocab"], found["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_tokens(found["additional_special_tokens"])
    _put_space_in_front(backend, "prepend" if legacy else "first", split=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return _with_template(backend, MISTRAL_TEMPLATE)


def _put_space_in_front(backend: Tokenizer, scheme: str, *, split: bool) -> None:
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def _with_template(backend: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", name_or_path="made"
    )
    fast.chat_template = template
    return fast


def _mon() -> PreTrainedTokenizerFast:
    """A Unigram tokenizer for Mon, Burmese and English."""
    state = json.loads((files("mon_tokenizer") / "data" / "mon_tokenizer.json").read_text())
    return _with_template(Tokenizer.from_str(json.dumps(state)), ZEPHYR_TEMPLATE)


def _made(scheme: str, kind: type = models.BPE) -> PreTrainedTokenizerFast:
    """SentencePiece's two models, trained on a few lines; `scheme` says how a space gets in front."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    if kind is models.BPE:
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    else:
        backend = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    _put_space_in_front(backend, scheme, split=kind is models.Unigram)
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary |= {byte: len(vocabulary) + value for value, byte in enumerate(bytes_)}
    else:
        vocabulary += [[byte, -20.0] for byte in bytes_]
        state["model"]["byte_fallback"] = True
    return _with_template(Tokenizer.from_str(json.dumps(state)), ZEPHYR_TEMPLATE)


def _from_models(name: str) -> PreTrainedTokenizerFast:
    folder = ROOT / ".models" / name
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"{name} is not in .models; `make test` fetches it")
    fast: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return fast


def _byte_level(folder: Path, *, prefix: bool) -> PreTrainedTokenizerFast:
    fast = tiny_tokenizer(folder)
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    fast.chat_template = CHAT_TEMPLATE
    return fast


KINDS: dict[str, Callable[[Path], PreTrainedTokenizerFast]] = {
    "SmolLM2 (byte-level BPE)": lambda _: _from_models("SmolLM2-135M-Instruct"),
    "Qwen2.5 (byte-level BPE)": lambda _: _from_models("Qwen2.5-Coder-0.5B-Instruct"),
    "byte-level BPE with a space in front": lambda folder: _byte_level(folder, prefix=True),
    "Mistral (SentencePiece BPE, Prepend)": lambda _: _mistral(legacy=True),
    "Mistral (SentencePiece BPE, Metaspace first)": lambda _: _mistral(legacy=False),
    "SentencePiece BPE, Metaspace first": lambda _: _made("first"),
    "SentencePiece BPE, Metaspace always": lambda _: _made("always"),
    "SentencePiece BPE, Prepend": lambda _: _made("prepend"),
    "Mon (Unigram, Metaspace always)": lambda _: _mon(),
    "Unigram, Metaspace always": lambda _: _made("always", models.Unigram),
    "Unigram, Metaspace first": lambda _: _made("first", models.Unigram),
}
"""How each is made, in an empty folder."""
