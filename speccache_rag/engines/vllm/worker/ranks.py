"""What the ranks of tensor parallelism share: each holds some KV heads of every layer."""

from __future__ import annotations

import torch
import torch.distributed
from vllm.distributed.parallel_state import get_tp_group


def heads_of_rank(n_heads: int) -> slice:
    """The KV heads of the whole model that this rank holds. With more ranks than heads, several hold the same one."""
    group = get_tp_group()
    if n_heads >= group.world_size:
        own = n_heads // group.world_size
        return slice(group.rank_in_group * own, (group.rank_in_group + 1) * own)
    head = group.rank_in_group * n_heads // group.world_size
    return slice(head, head + 1)


def all_heads(own: torch.Tensor, n_heads: int) -> torch.Tensor:
    """[L, T, H, D] of all KV heads, from each rank's own; every rank takes part and gets the whole.

    Args:
        own: [L, T, H of this rank, D].
        n_heads: KV heads of the whole model.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, own.contiguous(), group=group.cpu_group)
    step = max(1, group.world_size // n_heads)  # ranks that hold the same head
    return torch.cat(parts[::step], dim=2)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's values, on the CPU. NaN stays NaN."""
    return _reduced(values, torch.distributed.ReduceOp.SUM)


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The maximum of every rank's values, on the CPU."""
    return _reduced(values, torch.distributed.ReduceOp.MAX)


def _reduced(values: torch.Tensor, how: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
    group = get_tp_group()
    values = values.cpu().contiguous()
    if group.world_size > 1:
        torch.distributed.all_reduce(values, op=how, group=group.cpu_group)
    return values
