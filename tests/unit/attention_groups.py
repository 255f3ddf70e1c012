"""Attention groups of vLLM over a backend that computes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


class PlainBuilder:
    """A builder whose metadata is what it was given."""

    requires_block_table_width = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert common_prefix_len == 0
        return common


class PlainBackend:
    """Takes blocks of any size."""

    sizes: ClassVar[list[Any]] = [MultipleOf(1)]
    builder: ClassVar[Any] = PlainBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: Any = None) -> list[Any]:
        return cls.sizes

    @classmethod
    def get_builder_cls(cls) -> Any:
        return cls.builder

    @staticmethod
    def get_name() -> str:
        return "PLAIN"


class SmallBlocks(PlainBackend):
    """Its kernels take blocks of two tokens only."""

    sizes: ClassVar[list[Any]] = [2]


def config(max_tokens: int, max_seqs: int = 64) -> Any:
    """As much of a `VllmConfig` as groups and sparse prefill look at."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs),
        model_config=SimpleNamespace(max_model_len=128),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def group(backend: Any, vllm_config: Any, block_size: int) -> AttentionGroup:
    """A group as the model runner makes it: with a builder, and kernel blocks where the backend needs them."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    made = AttentionGroup(backend, list(LAYERS), spec, 0)
    kernel_block_size = backend.sizes[0] if isinstance(backend.sizes[0], int) else block_size
    made.create_metadata_builders(vllm_config, torch.device("cpu"), kernel_block_size)
    return made
