"""Options as users of other wrappers spell them, brought to the names that count here.

For the front ends that promise that only a class name need change; `SpecCache` itself knows one name for each thing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from speccache_rag.errors import ConfigurationError
from speccache_rag.types import Completion

ALIASES = {
    "model_name": "model",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "request_timeout": "timeout",
}
"""Another wrapper's name to ours."""

OF_SERVICES = ("api_base", "api_key", "api_version", "base_url", "max_retries", "organization")
"""Options of remote models. They are taken and mean nothing: an engine in this process needs no key and no retry."""

OF_CALLS = (
    "frequency_penalty",
    "ignore_eos",
    "logprobs",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "structured_outputs",
    "stop_token_ids",
    "top_k",
)
"""Options of a call that a constructor takes too, for every call."""


class AnswerCut(UserWarning):
    """An answer ended at its limit. Python shows it once in a process; `finish_reason` tells it of each answer."""


@dataclass(frozen=True, slots=True)
class ConstructorOptions:
    """Options given to a front end, by whom they are for."""

    own: dict[str, Any]
    """The front end's own fields."""
    calls: dict[str, Any]
    """Options of every call."""
    config: dict[str, Any]
    """Fields of `SpecCacheConfig`, and what nobody knows, which that refuses."""

    @classmethod
    def of(cls, options: Mapping[str, Any], fields: Collection[str]) -> ConstructorOptions:
        """Sort the options of a constructor whose own fields are `fields`.

        Raises:
            ConfigurationError: one option is given under two names.
        """
        rest = canonical(options)
        own = {name: rest.pop(name) for name in fields if name in rest}
        calls = {name: value for name in OF_CALLS if (value := rest.pop(name, None)) is not None}
        for name in OF_SERVICES:
            rest.pop(name, None)
        if (window := rest.pop("context_window", None)) is not None:
            engine_options = dict(rest.get("engine_options") or {})
            if engine_options.setdefault("max_model_len", window) != window:
                raise _twice("context_window", "engine_options['max_model_len']")
            rest["engine_options"] = engine_options
        return cls(own, calls, rest)


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under our names: one `stop` text is a list of one, `max_tokens` -1 is None.

    Raises:
        ConfigurationError: one option is given under two names, with two values, or has no known shape.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        ours = ALIASES.get(name, name)
        if ours == "stop" and isinstance(value, str):
            value = [value]
        if ours == "max_tokens" and value == -1:
            value = None  # LangChain's and OpenAI's way to ask for what the context leaves
        if found.get(ours) not in (None, value) and value is not None:
            raise _twice(name, ours)
        if value is not None or ours not in found:
            found[ours] = value
    return _with_logprobs(_with_schema(found))


def _with_schema(options: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format`, as vLLM's guided decoding.

    Raises:
        ConfigurationError: it has no known shape.
    """
    form = options.pop("response_format", None)
    match form:
        case None | {"type": "text"}:
            return options
        case {"type": "json_object"}:
            return {"structured_outputs": {"json_object": True}, **options}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"structured_outputs": {"json": schema}, **options}
    raise ConfigurationError(
        f"response_format is {form!r}.",
        hint='Pass {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}.',
    )


def _with_logprobs(options: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's switch and count, as vLLM's one number: that of the likeliest tokens beside the chosen one."""
    top = options.pop("top_logprobs", None)
    if isinstance(options.get("logprobs"), bool):
        options["logprobs"] = (top or 0) if options["logprobs"] else None
    elif top is not None:
        options["logprobs"] = top
    return options


def warn_of_cut(completion: Completion) -> None:
    """Warn that an answer ended at its limit, if it did: pipelines show users the text, and not why it ends."""
    if completion.finish_reason == "length":
        warnings.warn(
            "An answer was cut at max_tokens, or where the model's context ends. Raise max_tokens (None takes what the "
            "context leaves), or retrieve less.",
            AnswerCut,
            stacklevel=2,
        )


def _twice(one: str, other: str) -> ConfigurationError:
    return ConfigurationError(f"{one} and {other} are the same option, given with two values.", hint="Give one.")
