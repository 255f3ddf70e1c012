"""vLLM's own options by name, checked before vLLM sees them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from speccache_rag.errors import ConfigurationError

_PACKAGE = __package__.rpartition(".")[0]
_OURS = ("model", "kv_transfer_config", "worker_extension_cls")
_REFUSED_SAMPLING = ("n", "output_kind", "extra_args", "skip_reading_prefix_cache", "prompt_logprobs")

MIN_FILL_TOKENS = 128
"""Without a floor, a stream of long prompts would leave fills no room in any step."""

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's default on GPUs, on which reuse was never shown (docs/vllm.md)."""

_MEMORY = ("kv_cache_memory_bytes", "gpu_memory_utilization")
CPU_KV_CACHE_BYTES = 2 << 30
"""On CPU vLLM would take 92 % of the machine's memory for itself, and refuse to start where less is free."""


def engine_args(model: Path, options: Mapping[str, Any], store: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments with our connector and worker extension in them.

    One option is ours: `min_fill_tokens`, the tokens of reuse regions that every step computes at least, however full
    it is.

    Raises:
        ConfigurationError: an option is unknown, ours to set, or refused by vLLM.
    """
    options = dict(options)
    min_fill_tokens = options.pop("min_fill_tokens", MIN_FILL_TOKENS)
    if not isinstance(min_fill_tokens, int) or min_fill_tokens < 1:
        raise ConfigurationError(
            f"Engine option 'min_fill_tokens' is {min_fill_tokens!r}; it must be a whole number of at least 1."
        )
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(set(options) - known):
        raise ConfigurationError(
            f"Unknown engine option {', '.join(map(repr, unknown))}.",
            hint="Options are vLLM's AsyncEngineArgs by name.",
        )
    if taken := sorted(set(options) & set(_OURS)):
        raise ConfigurationError(
            f"Engine option {', '.join(map(repr, taken))} is set by SpecCache itself.", hint="Leave it out."
        )
    if options.get("load_format") == "dummy" and store.get("path") is not None:
        raise ConfigurationError(
            f"load_format is 'dummy': random weights would fill the store at {store['path']!r} with meaningless KV.",
            hint="Pass store=None, or load the real weights.",
        )
    os.environ.setdefault(V2_RUNNER, "0")
    transfer = KVTransferConfig(
        kv_connector="SpecCacheConnector",
        kv_connector_module_path=f"{_PACKAGE}.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": dict(store), "min_fill_tokens": min_fill_tokens},
        kv_load_failure_policy="recompute",
    )
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if current_platform.is_cpu() and not (set(options) & set(_MEMORY) or "VLLM_CPU_KVCACHE_SPACE" in os.environ):
        defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    ours = {"kv_transfer_config": transfer, "worker_extension_cls": f"{_PACKAGE}.worker.extension.SpecCacheExtension"}
    return AsyncEngineArgs(model=str(model), **{**defaults, **options, **ours})


def sampling_params(options: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> SamplingParams:
    """vLLM's `SamplingParams` from options by name; None values count as not given.

    Without `max_tokens` the answer may take what the context leaves, as vLLM's server has it.
    `structured_outputs` (guided decoding) may be a dict of vLLM's `StructuredOutputsParams`: {"json": schema}, ...

    Raises:
        ConfigurationError: an option is unknown, refused, or out of vLLM's range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = set(SamplingParams.__annotations__) - set(_REFUSED_SAMPLING)
    if unknown := sorted(set(given) - known):
        usual = "max_tokens, temperature, top_p, top_k, min_p, seed, stop, logprobs, presence_penalty, ..."
        raise ConfigurationError(
            f"Unknown sampling option {', '.join(map(repr, unknown))}.",
            hint=f"Options are vLLM's SamplingParams: {usual} Template variables go into chat_template_kwargs.",
        )
    extra = {"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else None
    try:
        if isinstance(given.get("structured_outputs"), Mapping):
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        params = SamplingParams(**{"max_tokens": None, **given}, output_kind=RequestOutputKind.DELTA, extra_args=extra)
        # What vLLM's engine process cannot read, such as a seed that is a string, would stop it for good.
        MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    except (ValueError, TypeError, OverflowError, ValidationError, msgspec.MsgspecError, VLLMClientError) as error:
        raise ConfigurationError(f"Bad sampling options {given}: {error}", hint="") from error
    return params
