"""What this engine can serve, and the reason it gives for what it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.errors import UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose angles depend on the position alone and that have a parity test."""

ROPE_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)


def check_config(config: VllmConfig) -> None:
    """Refuse, before anything is loaded, a model or setting under which reuse is not proved.

    Raises:
        UnsupportedModel: the message gives the reason.
    """
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    layer_types = set(getattr(text, "layer_types", None) or ())
    window = model.get_sliding_window()
    reasons = {
        "it uses multi-head latent attention (MLA)": model.use_mla,
        f"it has sliding-window attention (window {window})": window is not None,
        f"its layers are of kinds {sorted(layer_types)}": bool(layer_types - {"full_attention"}),
        f"its RoPE is of kind {kind!r}; supported are {', '.join(ROPE_TYPES)}": kind not in ROPE_TYPES,
        "its RoPE has sections (multimodal)": "mrope_section" in rope,
        "it is an encoder-decoder model": model.is_encoder_decoder,
        "vLLM has no model class of its own for it, and its Transformers backend does not show its RoPE": (
            model.using_transformers_backend()
        ),
        "it does not generate text": model.runner_type != "generate",
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; only 1 is supported": (
            parallel.pipeline_parallel_size != 1
        ),
        f"data_parallel_size is {parallel.data_parallel_size}; only 1 is supported": parallel.data_parallel_size != 1,
        f"kv_cache_dtype is {config.cache_config.cache_dtype!r}; only 'auto' is supported": (
            config.cache_config.cache_dtype != "auto"
        ),
        "vLLM's V2 model runner is on (VLLM_USE_V2_MODEL_RUNNER), on which reuse was never shown": (
            config.use_v2_model_runner
        ),
        "LoRA adapters change KV and are not in a chunk's key": config.lora_config is not None,
        "vLLM's own speculative decoding is on": config.speculative_config is not None,
    }
    _refuse(str(model.model), reasons)


def attention_layers(runner: GPUModelRunner) -> dict[str, Attention]:
    """The model's attention layers by name, in layer order.

    Raises:
        UnsupportedModel: a layer keeps state that is not plain causal KV, or its backend cannot be written to.
    """
    state: Mapping[str, Any] = runner.compilation_config.static_forward_context
    layers = {}
    for name, layer in state.items():
        if not isinstance(layer, AttentionLayerBase):
            continue  # keeps nothing from one step to the next, as a mixture of experts
        if not isinstance(layer, Attention):
            raise UnsupportedModel(f"{name} is not supported: it is a {type(layer).__name__}, not attention with KV.")
        impl, backend = layer.impl, layer.attn_backend
        _refuse(
            name,
            {
                f"it has sliding-window attention (window {layer.sliding_window})": layer.sliding_window is not None,
                f"it is {layer.attn_type!r} attention": layer.attn_type != AttentionType.DECODER,
                "it shares another layer's KV cache": layer.kv_sharing_target_layer_name is not None,
                "it uses ALiBi": getattr(impl, "alibi_slopes", None) is not None,
                f"its backend {backend.get_name()} writes the KV cache inside attention": (
                    backend.forward_includes_kv_cache_update or not hasattr(impl, "do_kv_cache_update")
                ),
            },
        )
        layers[name] = layer
    _refuse(
        "The model",
        {
            "it has no attention layers": not layers,
            f"its KV cache has {len(runner.attn_groups)} groups; only one is supported": len(runner.attn_groups) != 1,
        },
    )
    return layers


def rope_tables(model: nn.Module, layers: Mapping[str, Attention]) -> list[RopeTable | None]:
    """Each layer's rotation table, in layer order; None where the layer has no RoPE.

    Raises:
        UnsupportedModel: a layer's RoPE is not of a supported class.
    """
    owner = {id(child): parent for parent in model.modules() for child in parent.children()}
    tables: dict[int, RopeTable] = {}
    found: list[RopeTable | None] = []
    for name, layer in layers.items():
        rotary = getattr(owner.get(id(layer)), "rotary_emb", None)
        if rotary is None:
            found.append(None)
            continue
        kind = type(rotary).__name__
        _refuse(name, {f"its RoPE is a {kind}; supported are {', '.join(ROPE_CLASSES)}": kind not in ROPE_CLASSES})
        if id(rotary) not in tables:
            tables[id(rotary)] = RopeTable.from_cache(_exact_cache(rotary), neox=rotary.is_neox_style)
        found.append(tables[id(rotary)])
    return found


def _exact_cache(rotary: Any) -> torch.Tensor:
    """The layer's cos/sin table in float32.

    vLLM rounds the table to the model's dtype after computing it; recovery would round a second time. Its own
    computation gives the table before rounding, and is used only if it rounds to the very table in use.
    """
    cache: torch.Tensor = rotary.cos_sin_cache
    if cache.dtype == torch.float32:
        return cache
    with torch.device("cpu"):
        exact: torch.Tensor = rotary._compute_cos_sin_cache().to(cache.device)
    return exact if torch.equal(exact.to(cache.dtype), cache) else cache


def _refuse(what: str, reasons: Mapping[str, bool]) -> None:
    true = [reason for reason, holds in reasons.items() if holds]
    if true:
        raise UnsupportedModel(f"{what} is not supported: {'; '.join(true)}.")
