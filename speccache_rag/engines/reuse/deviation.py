"""How far stored KV is from true KV at one layer."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from speccache_rag.engines.reuse.fill_job import Region, stored_kv
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.errors import ConfigurationError
from speccache_rag.store.base import ChunkStore
from speccache_rag.types import ChunkKey


def kv_deviation_of(
    true: torch.Tensor,
    region: Region,
    store: ChunkStore,
    rope: RopeTable | None,
    layer: int,
    of: Literal["value", "key"],
) -> np.ndarray:
    """float32 [T] over `region.token_ids`: squared L2 distance over heads and dimensions.

    Args:
        true: [region_end, H, D], keys or values of a full prefill at `layer`.
        region: the chunks and where they stand.
        store: where their KV is.
        rope: the layer's rotation, None where it has none.
        layer: layer index.
        of: which of both `true` holds.

    NaN outside chunks; 0 in a chunk without stored KV, which is computed whatever is chosen.
    """
    deviation = torch.full((len(region.token_ids),), float("nan"))
    for key, start, length in region.chunks:
        here = slice(start, start + length)
        kv = stored_kv(store, ChunkKey(key), region.token_ids[here])
        if kv is None:
            deviation[here] = 0.0
            continue
        stored = (kv.values if of == "value" else kv.keys)[layer, :length].to(true.device)
        if of == "key" and rope is not None:
            stored = rope.move(stored, start - kv.position)
        deviation[here] = (true[here] - stored.float()).square().sum(dim=(1, 2)).cpu()
    return deviation.numpy()


def check_layer(layer: int, n_layers: int) -> None:
    """Refuse a layer index that the model does not have.

    Raises:
        ConfigurationError: the message names it and the limit.
    """
    if not 0 <= layer < n_layers:
        raise ConfigurationError(f"Layer index {layer} is out of range; the model has layers 0 to {n_layers - 1}.")
