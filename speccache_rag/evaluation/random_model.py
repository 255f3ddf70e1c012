"""A model with random weights in the shape of a known one: as fast as the real one, and nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from speccache_rag.errors import ConfigurationError

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "qwen2.5-14b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
    },
}
"""By name; the vocabulary is one of bytes, which no prefill time depends on."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_model(folder: Path, shape: str, *, dtype: torch.dtype, n_layers: int | None = None) -> None:
    """Write config, tokenizer and weights; a token is a byte.

    Args:
        folder: made if it is not there.
        shape: a name in `SHAPES`.
        dtype: of the weights.
        n_layers: fewer layers than the shape has, where the device is too small.

    Raises:
        ConfigurationError: there is no such shape; the message lists those there are.
    """
    if shape not in SHAPES:
        raise ConfigurationError(f"shape is {shape!r}.", hint=f"Known: {', '.join(SHAPES)}.")
    facts = dict(SHAPES[shape])
    if n_layers is not None:
        facts["num_hidden_layers"] = n_layers
    tokenizer = _byte_tokenizer()
    config = AutoConfig.for_model(
        **facts,
        vocab_size=len(tokenizer),
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    causal: Any = AutoModelForCausalLM
    model = causal.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*letters, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast_class: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = fast_class(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = TEMPLATE
    return fast
