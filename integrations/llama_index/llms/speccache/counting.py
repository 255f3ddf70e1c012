"""LlamaIndex's tokens beside the model's: LlamaIndex packs prompts by a count of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized

from speccache_rag.types import Chunk

SAMPLE = 64
"""Known chunks that are counted."""


def window_in_llama_index_tokens(max_model_len: int, chunks: Iterable[Chunk], count: Callable[[str], Sized]) -> int:
    """The model's context in the tokens that LlamaIndex counts.

    LlamaIndex counts with one tokenizer for the whole process, which is GPT's unless the user sets another. Where the
    model needs more tokens for a text (Japanese, with most small models), nodes that fit by that count do not fit the
    model. The known chunks tell by how much: of those, no mixture overflows the window that this gives.

    Args:
        max_model_len: the model's context, in its own tokens.
        chunks: some of the chunks that prompts are made of.
        count: LlamaIndex's tokenizer.
    """
    ratios = [chunk.n_tokens / max(1, len(count(chunk.text))) for chunk in chunks]
    return int(max_model_len / max(1.0, *ratios)) if ratios else max_model_len
