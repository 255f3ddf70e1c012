"""Options of one call, beside the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from speccache_rag.config import Scoring
from speccache_rag.errors import ConfigurationError


class PlanOptions(TypedDict, total=False):
    """Options that replace configured ones for one call; None leaves the configured one."""

    policy: str | None
    """Another selection policy, with its default options."""
    recompute_ratio: float | None
    scoring: Scoring | None


class CallOptions(PlanOptions, total=False):
    """Options of `generate` and its kin. vLLM takes all its `SamplingParams` by name, of which these are the usual."""

    max_tokens: int | None
    """Default: what the context leaves."""
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    logprobs: int | None
    structured_outputs: Any
    """A dict of vLLM's `StructuredOutputsParams`: {"json": schema}, {"regex": ...}, ..."""
    timeout: float | None
    """Seconds until the call fails with RequestTimeout."""
    tools: Sequence[Mapping[str, Any]] | None
    """For messages, in OpenAI's shape; so are the next three."""
    tool_choice: Any
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


def plan_options(options: Mapping[str, Any]) -> PlanOptions:
    """The options of a plan, as far as they are set.

    Raises:
        ConfigurationError: there is another among them.
    """
    planned, others = split_options(options)
    if others:
        known = ", ".join(PlanOptions.__annotations__)
        raise ConfigurationError(f"A plan has no option {', '.join(map(repr, others))}.", hint=f"Known: {known}.")
    return planned


def split_options(options: Mapping[str, Any]) -> tuple[PlanOptions, dict[str, Any]]:
    """The options of the plan, as far as they are set, and all others."""
    planned: Any = {name: options[name] for name in PlanOptions.__annotations__ if options.get(name) is not None}
    return planned, {name: value for name, value in options.items() if name not in PlanOptions.__annotations__}
