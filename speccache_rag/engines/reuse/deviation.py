"""The deviation of stored from true KV at one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.errors import ConfigurationError
from speccache_rag.types import ChunkKV


def kv_deviation_of(
    true: torch.Tensor,
    plan: ReusePlan,
    kv_of: Callable[[str], ChunkKV | None],
    rope: RopeTable | None,
    layer: int,
    of: Literal["value", "key"],
    heads: slice = slice(None),
) -> torch.Tensor:
    """float32 [T] over the prompt, on the CPU: squared L2 distance over heads and dimensions.

    Args:
        true: [region_end, H, D], keys or values of a full prefill at `layer`.
        plan: the chunks and where they stand.
        kv_of: the stored KV of a key, None where it has none of use.
        rope: the layer's rotation, None where it has none.
        layer: layer index.
        of: which of both `true` holds.
        heads: KV heads of the whole model that `true` holds.

    NaN outside chunks; 0 in a chunk without stored KV, which is computed whatever is chosen.
    """
    deviation = torch.full((len(plan.token_ids),), float("nan"))
    for chunk in plan.stored:
        here = slice(chunk.start, chunk.end)
        kv = kv_of(chunk.key)
        if kv is None:
            deviation[here] = 0.0
            continue
        stored = (kv.values if of == "value" else kv.keys)[layer, : chunk.length, heads].to(true.device)
        if of == "key" and rope is not None:
            stored = rope.move(stored, chunk.start - kv.position)
        deviation[here] = (true[here] - stored.float()).square().sum(dim=(1, 2)).cpu()
    return deviation


def check_layer(layer: int, n_layers: int) -> None:
    """Refuse a layer index that the model does not have.

    Raises:
        ConfigurationError: the message names it and the limit.
    """
    if not 0 <= layer < n_layers:
        raise ConfigurationError(f"Layer index {layer} is out of range; the model has layers 0 to {n_layers - 1}.")
