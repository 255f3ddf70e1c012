"""Attention probabilities of a few queries over many keys: what selection by query attention looks at."""

from __future__ import annotations

import torch


def attention_on_keys(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, first_position: int, soft_cap: float | None = None
) -> torch.Tensor:
    """float32 [Q, T]: for each query the maximum over heads of its attention probability on each key.

    Args:
        queries: [Q, Hq, D], after RoPE, at positions `first_position .. first_position + Q - 1`.
        keys: [T, H, D], after RoPE, at positions 0 .. T - 1; Hq is a multiple of H (grouped-query attention).
        scale: factor on the dot products.
        first_position: position of the first query.
        soft_cap: logits are soft_cap * tanh(logits / soft_cap) where it is given.
    """
    n_queries, n_heads, head_dim = queries.shape
    n_keys, n_kv_heads, _ = keys.shape
    grouped = queries.float().view(n_queries, n_kv_heads, n_heads // n_kv_heads, head_dim)
    logits = torch.einsum("qhgd,thd->qhgt", grouped, keys.float()) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    positions = torch.arange(n_keys, device=keys.device)
    visible = positions[None] <= first_position + torch.arange(n_queries, device=keys.device)[:, None]
    probabilities = logits.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
    return probabilities.amax(dim=(1, 2))
