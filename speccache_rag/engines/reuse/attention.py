"""Attention probabilities of a few queries over many keys: what selection by query attention looks at."""

from __future__ import annotations

import torch

QUERY_TOKENS = 256
"""The last so many tokens of a query are looked at: a long one (a chat's history, a few-shot prompt) ends with what is
asked, and the cost stays bounded."""

TILE_ELEMENTS = 1 << 21
"""Logits that exist at one time, as float32 numbers: 8 MiB, and a few times that while they are worked on."""


def attention_on_keys(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    first_position: int,
    soft_cap: float | None = None,
    most: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [Q, T]: for each query the maximum over heads of its attention probability on each key.

    Works on the device of `keys`, in tiles of one KV head and a few queries; beside the result it needs some 40 MiB,
    and one head's keys in float32.

    Args:
        queries: [Q, Hq, D], after RoPE, at positions `first_position .. first_position + Q - 1`.
        keys: [T, H, D], after RoPE, at positions 0 .. T - 1; Hq is a multiple of H (grouped-query attention).
        scale: factor on the dot products.
        first_position: position of the first query.
        soft_cap: logits are soft_cap * tanh(logits / soft_cap) where it is given.
        most: what was found in another layer; the maximum of both is written into it and returned.
    """
    n_queries, n_heads, head_dim = queries.shape
    n_keys, n_kv_heads, _ = keys.shape
    group = n_heads // n_kv_heads
    tile = max(1, TILE_ELEMENTS // max(1, group * n_keys))
    positions = torch.arange(n_keys, device=keys.device)
    if most is None:
        most = torch.zeros(n_queries, n_keys, device=keys.device)
    for head in range(n_kv_heads):
        of_head = keys[:, head].float()
        for start in range(0, n_queries, tile):
            rows = queries[start : start + tile, head * group : (head + 1) * group].to(keys.device).float()
            n_rows = len(rows)
            logits = (rows.reshape(-1, head_dim) @ of_head.T).mul_(scale).view(n_rows, group, n_keys)
            if soft_cap:
                logits = logits.div_(soft_cap).tanh_().mul_(soft_cap)
            at = first_position + start + torch.arange(n_rows, device=keys.device)
            logits.masked_fill_((positions[None] > at[:, None])[:, None], float("-inf"))
            probabilities = logits.softmax(dim=-1).amax(dim=1)
            torch.maximum(most[start : start + n_rows], probabilities, out=most[start : start + n_rows])
    return most
