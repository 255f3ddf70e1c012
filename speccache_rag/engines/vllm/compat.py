"""vLLM's internals where its versions differ (docs/vllm.md)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

_OF_ONE_RUNNER: dict[str, Any] = {"metadata_builders": [], "kernel_block_table": None, "kernel_block_offsets": None}
"""What a group holds for the steps of its runner. 0.31 knows only the first of them."""


def copied(group: AttentionGroup) -> AttentionGroup:
    """An attention group without builders and tables, for another user than the model runner."""
    known = {field.name for field in fields(group)}
    return replace(group, **{name: value for name, value in _OF_ONE_RUNNER.items() if name in known})


def built(group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
    """A group's attention metadata for one batch."""
    if hasattr(group, "build_metadata"):
        return group.build_metadata(common)
    return group.get_metadata_builder().build(0, common)  # 0.31: no block table to be mapped first
