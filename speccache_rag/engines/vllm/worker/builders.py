"""Builders of attention metadata for sparse forwards, apart from the model runner's."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from speccache_rag.engines.vllm.compat import copied


def own_groups(runner: GPUModelRunner) -> list[AttentionGroup]:
    """The runner's attention groups, each with a metadata builder of its own.

    A builder may keep one buffer that all its metadata are views of (FlashAttention 3 and FlashInfer do). What the
    runner has built for its step must not change because a sparse forward builds another.
    """
    return [own_group(group, runner) for group in runner.attn_groups[0]]


def own_group(group: AttentionGroup, runner: Any) -> AttentionGroup:
    """A copy of one group, with builder and kernel block table of its own."""
    own = copied(group)
    kernel_block_size = group.get_metadata_builder().kv_cache_spec.block_size
    own.create_metadata_builders(runner.vllm_config, runner.device, kernel_block_size)
    return own
