"""Complete model folders made from nothing: random weights, a small tokenizer, every architecture of tests/kinds.py.

The weights are large enough for peaked attention and spread logits, so that one wrong key or value shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.kinds import KINDS

VOCAB_SIZE = 768
WEIGHT_STD = 0.12
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# ChatML, and tools as Hermes and Qwen have them.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nAnswer with <tool_call>:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}

CORPUS = """
The lighthouse keeper wrote down the weather every morning: wind from the north, a falling glass, rain before noon.
Ships that passed the cape answered with two short blasts of the horn, and the keeper noted their names in the log.
In the spring of 1887 a storm broke the lantern, and for nine nights a fire of driftwood burned on the rocks instead.
A library keeps its old maps in long flat drawers, because paper that was rolled once never lies quite still again.
The oldest map shows a river that has since moved three miles to the east; the bridge it names now crosses a meadow.
To bake rye bread, mix flour, water and salt with a sour starter, wait until the dough has doubled, and heat the oven.
Bread baked on stone has a darker crust than bread baked in a tin, and it keeps for a week in a cloth bag.
The small museum opens at ten o'clock on weekdays. Visitors may ask the guide about clocks, tools, coins and toys.
A pendulum clock loses time in summer because its rod grows longer with heat, and so it swings more slowly.
Bees find their way home by the sun; on cloudy days they read the pattern of the light that comes through.
Question: who lit the fire on the rocks? Answer: the keeper of the lighthouse did, for nine nights in a row.
Use the context below to answer the question. If the context does not hold the answer, say that you do not know.
def read_table(path, separator=","): return [line.split(separator) for line in open(path) if line.strip()]
for index, value in enumerate(values): total += value * weights[index]  # a plain weighted sum, nothing more
{"name": "north harbour", "boats": 42, "open": true, "depth_m": [3.5, 4.0, 6.25], "manager": null}
Zürich, Málaga, Kraków, 東京, Москва: five towns whose names hold letters outside the plain alphabet.
system user assistant context question answer document source page title author year number first second third
"""


def tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `VOCAB_SIZE` tokens with a ChatML template, saved to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=SIZES["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def tiny_model(folder: Path, kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """A model folder (config, float32 weights, tokenizer) of one of `KINDS` (tests/kinds.py).

    Args:
        folder: Where to write it.
        kind: Name of one of `KINDS`.
        seed: Same seed, same weights.
        overrides: Fields of the config to set differently.

    Returns:
        `folder`.
    """
    made = KINDS[kind]
    tokenizer = tiny_tokenizer(folder)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = made.config(**{**SIZES, **special, "dtype": torch.float32, **made.options, **overrides})
    model = made.model(config).float()
    _randomize(model, seed)
    model.save_pretrained(folder)
    return folder


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Normal weights of std `WEIGHT_STD`; norms near one, each different, so that a skipped norm shows too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * WEIGHT_STD
            parameter.copy_(1 + noise if "norm" in name else noise)
