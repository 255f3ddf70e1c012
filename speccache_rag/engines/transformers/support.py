"""The checks that refuse a model this engine cannot serve, each with its reason."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.engines.transformers.cache import CacheShape
from speccache_rag.errors import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE kinds whose angles depend on the position alone and that have a parity test."""

ROPE_SAMPLES = 64
"""Positions at which the model's rotary module is compared with the table made of its frequencies."""


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Refuse, before anything is loaded, a model for which reuse is not proved.

    Raises:
        UnsupportedModel: the message gives the reason.
    """
    text: Any = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer = {kind for kind, value in rope.items() if isinstance(value, Mapping)}
    kind = rope.get("rope_type", "default")
    layer_types = set(getattr(text, "layer_types", None) or ())
    reasons = {
        "it is an encoder-decoder model": getattr(config, "is_encoder_decoder", False),
        "it has cross-attention": getattr(text, "add_cross_attention", False),
        "it uses multi-head latent attention (MLA)": getattr(text, "kv_lora_rank", None) is not None,
        f"it has sliding-window attention (window {_window(text)})": _window(text) is not None,
        f"its layers are of kinds {sorted(layer_types)}": bool(layer_types - {"full_attention"}),
        "it attends in fixed pieces (attention_chunk_size)": getattr(text, "attention_chunk_size", None) is not None,
        "it has no rope_parameters: its positions are not rotary (RoPE)": not rope,
        f"its RoPE is of kind {kind!r}; supported are {', '.join(ROPE_TYPES)}": kind not in ROPE_TYPES,
        f"its RoPE differs between layers ({', '.join(sorted(by_layer))})": bool(by_layer),
        "its RoPE has sections (multimodal)": "mrope_section" in rope,
        "some of its layers have no RoPE": not all(getattr(text, "no_rope_layers", None) or [True]),
        "it uses ALiBi": getattr(text, "alibi", False),
        "its layers share KV caches": bool(getattr(text, "num_kv_shared_layers", 0)),
        "its attention is not causal": not getattr(text, "is_causal", True),
    }
    _refuse(name, reasons)


def _window(text: Any) -> int | None:
    """The sliding window of a model whose config does not say which layers have one."""
    if getattr(text, "layer_types", None) or not getattr(text, "use_sliding_window", True):
        return None
    window: int | None = getattr(text, "sliding_window", None)
    return window


def check_model(name: str, model: PreTrainedModel) -> None:
    """Refuse what only the loaded classes tell.

    Raises:
        UnsupportedModel: the message gives the reason.
    """
    _refuse(name, {"it has recurrent layers": bool(getattr(model, "_is_stateful", False))})


def rope_table(model: nn.Module, positions: int) -> RopeTable:
    """The model's own rotation angles for position differences 0 .. `positions` - 1, on its device.

    Raises:
        UnsupportedModel: it has not exactly one rotary module, or that module does more than rotate by
            position times frequency.
    """
    found = [m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
    _refuse(type(model).__name__, {f"it has {len(found)} rotary modules; one is supported": len(found) != 1})
    rotary: Any = found[0]
    frequencies: torch.Tensor = rotary.inv_freq.float()
    angles = torch.arange(positions, device=frequencies.device)[:, None].float() * frequencies
    sample = torch.linspace(0, positions - 1, ROPE_SAMPLES, device=frequencies.device).long()
    # The module gives its angles in the dtype of its first argument.
    cos, sin = rotary(torch.empty(1, device=frequencies.device), sample[None])
    apply = _rotation_of(model)
    scale = float(rotary.attention_scaling)
    turn = (angles.cos(), angles.sin())
    for neox in (True, False):
        table = RopeTable(*turn, neox)
        if _rotates_as(table, sample, cos, sin, scale, apply):
            return table
    raise UnsupportedModel(
        f"{type(model).__name__} is not supported: its {type(rotary).__name__} does more than rotate pairs by position "
        "times frequency."
    )


def _rotation_of(model: nn.Module) -> Any:
    """The function with which the model's own module turns queries and keys; None where it has no such function."""
    apply = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    usual = apply is not None and list(inspect.signature(apply).parameters)[:4] == ["q", "k", "cos", "sin"]
    return apply if usual else None


def _rotates_as(
    table: RopeTable, sample: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, apply: Any
) -> bool:
    """Whether the model turns keys at the positions `sample` as `table` does, times `scale`.

    `cos` and `sin` are its own, [1, S, R]. How they pair up the members of a head (halves, as in NeoX, or neighbours,
    as in GPT-J) shows in its `apply`; a model that has none is taken to pair what gets the same angle.
    """
    both = [t[sample] for t in (table.cos, table.sin)]
    if apply is None:
        both = [torch.cat((t, t), dim=-1) if table.neox else t.repeat_interleave(2, dim=-1) for t in both]
        return _same(cos[0], both[0] * scale) and _same(sin[0], both[1] * scale)
    key = torch.linspace(-1, 1, cos.shape[-1], device=cos.device).expand(1, 1, len(sample), -1)
    turned = apply(key, key, cos, sin)[1][0, 0]
    expected = [table.move(key[0, 0, :1], position) for position in sample.tolist()]
    return _same(turned, torch.cat(expected) * scale)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool(torch.allclose(found, expected, atol=1e-5, rtol=0))


def kv_shape(name: str, cache: Cache, n_layers: int, n_tokens: int) -> CacheShape:
    """What the model left in a cache after a prefill of `n_tokens` tokens.

    Raises:
        UnsupportedModel: it is not one plain [1, H, T, D] tensor of keys and one of values in every layer.
    """
    layers: list[Any] = list(cache.layers)
    _refuse(name, {f"{len(layers)} of its {n_layers} layers keep KV": len(layers) != n_layers})
    shapes = {tuple(getattr(kind, "shape", ())) for layer in layers for kind in (layer.keys, layer.values)}
    shape = min(shapes)
    plain = len(shapes) == 1 and len(shape) == 4 and shape[::2] == (1, n_tokens)
    _refuse(name, {f"its layers keep keys and values of shapes {sorted(shapes)}": not plain})
    return CacheShape(n_layers, shape[1], shape[3], layers[0].keys.dtype, layers[0].keys.device)


def _refuse(what: str, reasons: Mapping[str, bool]) -> None:
    true = [reason for reason, holds in reasons.items() if holds]
    if true:
        raise UnsupportedModel(f"{what} is not supported: {'; '.join(true)}.")
