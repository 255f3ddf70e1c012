from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from speccache_rag.engines.vllm.plan import runs
from speccache_rag.engines.vllm.worker.paging import slots_of
from speccache_rag.engines.vllm.worker.sparse import SparsePrefill

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
BLOCK_SIZE = 4


def prefill(max_tokens: int, max_seqs: int, device: str = "cuda") -> SparsePrefill:
    limits = SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs)
    config = SimpleNamespace(scheduler_config=limits)
    runner: Any = SimpleNamespace(vllm_config=config, device=torch.device(device))
    return SparsePrefill(runner)


def positions_of(batch: Sequence[tuple[int, int]]) -> list[int]:
    return [p for start, end in batch for p in range(start, end)]


@settings(deadline=None)
@given(st.sets(st.integers(0, 80)), st.integers(1, 12), st.integers(1, 6))
def test_slices_keep_order_and_limits(chosen: set[int], max_tokens: int, max_runs: int) -> None:
    slices = list(prefill(max_tokens, max_runs)._slices(runs(np.array(sorted(chosen), dtype=np.int64))))
    assert positions_of([run for batch in slices for run in batch]) == sorted(chosen)
    for batch in slices:
        assert 1 <= len(positions_of(batch)) <= max_tokens
        assert len(batch) <= max_runs
        assert all(start < end for start, end in batch)
    # Packed: a batch ends only where a limit is reached.
    for batch in slices[:-1]:
        assert len(positions_of(batch)) == max_tokens or len(batch) == max_runs


def test_the_cpu_backend_has_no_limit_of_runs() -> None:
    scattered = runs(np.arange(0, 40, 2))
    assert len(list(prefill(100, 4, "cpu")._slices(scattered))) == 1
    assert len(list(prefill(100, 4, "cuda")._slices(scattered))) == 5


@settings(deadline=None)
@given(st.sets(st.integers(0, 80), min_size=1), st.integers(1, 12))
def test_a_token_at_position_p_sees_p_plus_one_keys(chosen: set[int], max_tokens: int) -> None:
    prefiller = prefill(max_tokens, max_tokens, "cpu")
    table = torch.arange(30, dtype=torch.int32)
    for batch in prefiller._slices(runs(np.array(sorted(chosen)))):
        slots = torch.arange(len(positions_of(batch)))
        common = prefiller._metadata(batch, table, slots)
        assert sees(common) == [p + 1 for p in positions_of(batch)]
        assert common.causal
        assert common.num_reqs == len(batch)
        assert common.num_actual_tokens == len(slots)
        assert common.max_query_len == max(end - start for start, end in batch)
        assert common.max_seq_len == batch[-1][1]
        assert torch.equal(common.block_table_tensor, table.repeat(len(batch), 1))
        assert common.query_start_loc.dtype == common.seq_lens.dtype == torch.int32


def sees(common: CommonAttentionMetadata) -> list[int]:
    """Keys each query token sees: causal attention is aligned to the end of its own sequence."""
    starts, ends = common.query_start_loc.tolist(), common.seq_lens.tolist()
    seen = []
    for begin, stop, end in zip(starts[:-1], starts[1:], ends, strict=True):
        seen += [end - (stop - begin) + i + 1 for i in range(stop - begin)]
    return seen


class FakeRunner:
    """A runner whose model notes what it was given, and under which forward context."""

    def __init__(self, max_tokens: int) -> None:
        self.vllm_config = VllmConfig()
        self.vllm_config.scheduler_config.max_num_batched_tokens = max_tokens
        self.device = torch.device("cpu")
        self.attn_groups = [[self]]
        self.layer_names = LAYERS
        self.calls: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def get_metadata_builder(self) -> FakeRunner:
        return self

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert common_prefix_len == 0
        return common

    def model(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.calls.append((input_ids, positions, get_forward_context()))


@pytest.mark.parametrize("rope_offset", [0, 1000])
def test_the_model_gets_the_tokens_positions_and_slots_of_each_slice(rope_offset: int) -> None:
    runner: Any = FakeRunner(max_tokens=5)
    token_ids = list(range(200, 230))
    chosen = np.array([1, 2, 3, 4, 5, 6, 11, 12, 20])
    block_ids = [9, 2, 7, 30, 1, 4, 5, 6]
    slots = slots_of(block_ids, BLOCK_SIZE, 30, torch.device("cpu"))
    SparsePrefill(runner)(token_ids, chosen, block_ids, slots, rope_offset=rope_offset)

    assert [len(ids) for ids, _, _ in runner.calls] == [5, 4]
    given_ids = torch.cat([ids for ids, _, _ in runner.calls])
    assert given_ids.dtype == torch.int32  # as the compiled graph was traced
    assert given_ids.tolist() == [200 + p for p in chosen]
    given_positions = torch.cat([positions for _, positions, _ in runner.calls])
    assert given_positions.dtype == torch.int64
    assert given_positions.tolist() == [p + rope_offset for p in chosen]
    # The offset turns keys and moves nothing.
    seen: list[int] = []
    written: list[int] = []
    for _, _, context in runner.calls:
        assert set(context.attn_metadata) == set(context.slot_mapping) == set(LAYERS)
        common = context.attn_metadata[LAYERS[0]]
        assert torch.equal(common.slot_mapping, context.slot_mapping[LAYERS[1]])
        seen += sees(common)
        written += common.slot_mapping.tolist()
    assert seen == [p + 1 for p in chosen]
    assert written == [block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in chosen]


def test_nothing_to_recompute_runs_nothing() -> None:
    runner: Any = FakeRunner(max_tokens=5)
    nothing = np.empty(0, dtype=np.int64)
    SparsePrefill(runner)([1, 2, 3], nothing, [1], torch.arange(3))
    assert runner.calls == []
