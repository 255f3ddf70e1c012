"""Options by name, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speccache_rag.errors import ConfigurationError

Options = TypeVar("Options", bound=BaseModel)


class EngineOptions(BaseModel):
    """Options of the Transformers engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str | None = Field(
        default=None, description="'cpu', 'mps', 'cuda', 'cuda:1'; None takes the best there is."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="'auto' takes the dtype the weights were saved in."
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="Tokens, prompt and answer together; None takes the model's own limit."
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        default="sdpa", description="'eager' is slower, and there for models without 'sdpa'."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model.")
    revision: str | None = Field(default=None, description="Of a model on the hub.")
    tokenizer: str | None = Field(default=None, description="Another folder or hub id.")
    tokenizer_revision: str | None = Field(default=None, description="Of a tokenizer on the hub.")
    tokenizer_mode: Literal["auto", "hf"] = Field(default="auto", description="vLLM's name; both mean a fast one.")


def checked(model: type[Options], kind: str, options: Mapping[str, Any]) -> Options:
    """Options from a plain mapping; None values count as not given.

    Raises:
        ConfigurationError: an option is unknown or out of range; the message names each, the hint the known ones.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(set(given) - set(model.model_fields)):
        hint = f"Known to the Transformers engine: {', '.join(model.model_fields)}."
        if "structured_outputs" in unknown:
            hint += " Guided decoding, which schemas and forced tool calls need, is the vLLM engine's."
        raise ConfigurationError(f"Unknown {kind} option {', '.join(map(repr, unknown))}.", hint=hint)
    try:
        return model(**given)
    except ValidationError as error:
        found = "; ".join(f"{e['loc'][0] if e['loc'] else kind} is {e['input']!r}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"Bad {kind} options: {found}.", hint="") from error


def resolve_device(name: str | None) -> torch.device:
    """The device called `name`; the best available one for None.

    Raises:
        ConfigurationError: it is unknown, not supported, or not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        name = next(kind for kind, there in available.items() if there)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device is {name!r}: {error}", hint=f"Known: {', '.join(available)}.") from error
    if not available.get(device.type, False):
        here = ", ".join(kind for kind, there in available.items() if there)
        raise ConfigurationError(f"device is {name!r}, which is not available.", hint=f"Available here: {here}.")
    return device
