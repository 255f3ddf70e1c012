"""Loading a tokenizer with the options that vLLM has for it, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from speccache_rag.errors import ConfigurationError

FAST_MODES = ("auto", "hf")
"""`tokenizer_mode`s whose tokenizer gives character offsets."""


def load_tokenizer(model: Path, options: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The target model's tokenizer.

    Args:
        model: the model's folder.
        options: an engine's; `tokenizer` names another folder or hub id, `tokenizer_revision` its revision,
            `trust_remote_code` allows code that comes with it.

    Raises:
        ConfigurationError: it cannot be loaded, needs code that is not trusted, or its mode gives no offsets.
    """
    mode = options.get("tokenizer_mode") or "auto"
    if mode not in FAST_MODES:
        raise ConfigurationError(
            f"tokenizer_mode is {mode!r}; reuse needs character offsets, which fast tokenizers alone give.",
            hint=f"Use {' or '.join(FAST_MODES)}, and a model whose folder holds a tokenizer.json.",
        )
    source = options.get("tokenizer") or model
    try:
        # Not None: Transformers would ask on standard input whether to trust.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source,
            revision=options.get("tokenizer_revision") or "main",
            trust_remote_code=bool(options.get("trust_remote_code")),
        )
    except (OSError, ValueError, ImportError) as error:
        raise remote_code_error(source, error) or ConfigurationError(
            f"The tokenizer of {str(source)!r} cannot be loaded: {error}", hint="Name another with engine_options."
        ) from error
    return tokenizer


def remote_code_error(source: object, error: Exception) -> ConfigurationError | None:
    """What to tell of an error of Transformers' about code that comes with a model; None for other errors."""
    if "trust_remote_code" not in str(error):
        return None
    return ConfigurationError(
        f"{str(source)!r} comes with code of its own, which is not trusted.",
        hint="If you trust it, pass engine_options={'trust_remote_code': True}; it then counts for model, tokenizer "
        "and speculative model.",
    )
