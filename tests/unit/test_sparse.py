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

from speccache_rag.engines.reuse.plan import runs
from speccache_rag.engines.vllm.worker.sparse import PagedPrompt, Run, SparsePrefill, StopForward, paged
from tests.unit.attention_groups import LAYERS, PlainBackend, SmallBlocks, config, group

BLOCK_SIZE = 4
POSITIONS = st.sets(st.integers(0, 80))


class Runner:
    """A runner whose model notes what it was given, and under which forward context."""

    def __init__(self, max_tokens: int, max_seqs: int = 64, device: str = "cpu", backend: Any = PlainBackend) -> None:
        limits = config(max_tokens, max_seqs)
        self.vllm_config: Any = limits
        self.device = torch.device(device)
        self.attn_groups = [[group(backend, limits, BLOCK_SIZE)]]
        self.calls: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self.stops_at: int | None = None

    def model(self, *, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        self.calls.append((input_ids, positions, get_forward_context()))
        if len(self.calls) == self.stops_at:
            raise StopForward


def prefill(runner: Any) -> SparsePrefill:
    made = SparsePrefill(runner, BLOCK_SIZE)
    # vLLM's forward context looks at many more settings than we do.
    made._config = VllmConfig()
    return made


def prompt(seed: int, n_tokens: int = 81) -> PagedPrompt:
    """A prompt whose blocks are its own, scattered."""
    rng = np.random.default_rng(seed)
    n_blocks = -(-n_tokens // BLOCK_SIZE)
    blocks = seed * 100 + rng.permutation(n_blocks)
    return paged([seed * 1000 + p for p in range(n_tokens)], blocks.tolist())


def slot(of: PagedPrompt, position: int) -> int:
    return int(of.table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def sees(common: CommonAttentionMetadata) -> list[int]:
    """Keys each query token sees: causal attention is aligned to the end of its own sequence."""
    starts, ends = common.query_start_loc.tolist(), common.seq_lens.tolist()
    seen = []
    for begin, stop, end in zip(starts[:-1], starts[1:], ends, strict=True):
        seen += [end - (stop - begin) + i + 1 for i in range(stop - begin)]
    return seen


def tables(common: CommonAttentionMetadata) -> list[list[int]]:
    """The block table of each query token's sequence, as far as its keys go."""
    starts, ends = common.query_start_loc.tolist(), common.seq_lens.tolist()
    found = []
    for row, (begin, stop, end) in enumerate(zip(starts[:-1], starts[1:], ends, strict=True)):
        found += [common.block_table_tensor[row, : -(-end // BLOCK_SIZE)].tolist()] * (stop - begin)
    return found


def assert_forwards_are(runner: Any, wanted: Sequence[tuple[PagedPrompt, list[int]]], rope_offset: int = 0) -> None:
    """What the model was given, over all its calls, are these positions in order, each in its own request."""
    expected = [(of, p) for of, positions in wanted for p in positions]
    ids, positions, seen, written, blocks = [], [], [], [], []
    for given_ids, given_positions, context in runner.calls:
        assert given_ids.dtype == torch.int32, "as the compiled graph was traced"
        assert given_positions.dtype == torch.int64
        assert set(context.attn_metadata) == set(context.slot_mapping) == set(LAYERS)
        common = context.attn_metadata[LAYERS[0]]
        assert torch.equal(common.slot_mapping, context.slot_mapping[LAYERS[1]])
        assert common.causal
        assert common.num_actual_tokens == len(given_ids)
        assert common.max_query_len == int(common.query_start_loc.diff().max())
        assert common.max_seq_len == int(common.seq_lens.max())
        assert common.query_start_loc.dtype == common.seq_lens.dtype == torch.int32
        ids += given_ids.tolist()
        positions += given_positions.tolist()
        seen += sees(common)
        written += common.slot_mapping.tolist()
        blocks += tables(common)
    assert ids == [int(of.token_ids[p]) for of, p in expected]
    assert positions == [p + rope_offset for _, p in expected], "the offset turns keys and moves nothing"
    assert seen == [p + 1 for _, p in expected]
    assert written == [slot(of, p) for of, p in expected]
    assert blocks == [of.table[: p // BLOCK_SIZE + 1].tolist() for of, p in expected] or all(
        found[: p // BLOCK_SIZE + 1] == of.table[: p // BLOCK_SIZE + 1].tolist()
        for found, (of, p) in zip(blocks, expected, strict=True)
    )


@settings(deadline=None)
@given(several=st.lists(POSITIONS, max_size=3), max_tokens=st.integers(1, 12), max_runs=st.integers(1, 6))
def test_batches_keep_order_and_limits(several: list[set[int]], max_tokens: int, max_runs: int) -> None:
    prefiller = SparsePrefill(Runner(max_tokens, max_runs, "cuda"), BLOCK_SIZE)  # type: ignore[arg-type]
    prompts = [prompt(i) for i in range(len(several))]
    wanted = [(of, p) for of, chosen in zip(prompts, several, strict=True) for p in sorted(chosen)]
    pending = [
        Run(of, start, end)
        for of, chosen in zip(prompts, several, strict=True)
        for start, end in runs(np.array(sorted(chosen), dtype=np.int64))
    ]
    batches = list(prefiller._batches(pending))
    assert [(run.of, p) for batch in batches for run in batch for p in range(run.start, run.end)] == wanted
    sizes = [sum(run.end - run.start for run in batch) for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert 1 <= size <= max_tokens
        assert len(batch) <= max_runs
    # Packed: a batch ends only where a limit is reached.
    assert all(s == max_tokens or len(b) == max_runs for b, s in list(zip(batches, sizes, strict=True))[:-1])


@settings(deadline=None)
@given(several=st.lists(POSITIONS.filter(bool), min_size=1, max_size=3), max_tokens=st.integers(1, 12))
def test_requests_share_a_forward_and_keep_to_their_own_blocks(several: list[set[int]], max_tokens: int) -> None:
    runner = Runner(max_tokens)
    wanted = [(prompt(i + 1), sorted(chosen)) for i, chosen in enumerate(several)]
    prefill(runner)([(of, np.array(chosen)) for of, chosen in wanted])
    assert_forwards_are(runner, wanted)
    total = sum(len(chosen) for _, chosen in wanted)
    assert len(runner.calls) == -(-total // max_tokens)


def test_the_cpu_backend_has_no_limit_of_runs() -> None:
    scattered = np.arange(0, 40, 2)
    pending = [Run(prompt(0), start, end) for start, end in runs(scattered)]
    for device, n_batches in (("cpu", 1), ("cuda", 5)):
        runner: Any = Runner(100, 4, "cpu")
        runner.device = torch.device(device)
        assert len(list(SparsePrefill(runner, BLOCK_SIZE)._batches(pending))) == n_batches


@pytest.mark.parametrize("rope_offset", [0, 1000])
def test_one_request_by_hand(rope_offset: int) -> None:
    runner = Runner(max_tokens=5)
    chosen = [1, 2, 3, 4, 5, 6, 11, 12, 20]
    one = prompt(7, 30)
    prefill(runner)([(one, np.array(chosen))], rope_offset=rope_offset)
    assert [len(ids) for ids, _, _ in runner.calls] == [5, 4]
    assert_forwards_are(runner, [(one, chosen)], rope_offset)


def test_a_backend_with_smaller_blocks_gets_a_table_of_them() -> None:
    """Kernel block j of block b is b * 2 + j; slots stay what they are."""
    runner: Any = Runner(max_tokens=64, backend=SmallBlocks)
    (runners_own,) = runner.attn_groups[0]
    runners_own.kernel_block_table.fill_(-7)
    one, other = prompt(3, 11), prompt(5, 6)
    prefill(runner)([(one, np.array([2, 9])), (other, np.array([5]))])
    ((_, _, context),) = runner.calls
    common = context.attn_metadata[LAYERS[0]]
    expected = [[2 * int(b) + j for b in of.table for j in range(2)] for of in (one, other)]
    rows = common.block_table_tensor.tolist()
    assert rows[0][:2] == expected[0][:2]
    assert rows[1][:5] == expected[0][:5]
    assert rows[2][:3] == expected[1][:3]
    assert common.slot_mapping.tolist() == [slot(one, 2), slot(one, 9), slot(other, 5)]
    assert runners_own.kernel_block_table.eq(-7).all(), "the runner's own mapped table is left alone"


def test_a_forward_that_has_been_seen_enough_of_ends_its_batch_only() -> None:
    runner = Runner(max_tokens=4)
    runner.stops_at = 1
    one = prompt(2, 12)
    prefill(runner)([(one, np.arange(10))])
    assert [len(ids) for ids, _, _ in runner.calls] == [4, 4, 2]


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_other_errors_pass_through(error: type[Exception]) -> None:
    runner: Any = Runner(max_tokens=4)

    def broken(**_: SimpleNamespace) -> None:
        raise error("the kernel failed")

    runner.model = broken
    with pytest.raises(error, match="the kernel failed"):
        prefill(runner)([(prompt(2), np.arange(3))])


def test_nothing_to_compute_runs_nothing() -> None:
    runner = Runner(max_tokens=5)
    nothing = np.empty(0, dtype=np.int64)
    prefill(runner)([])
    prefill(runner)([(prompt(1), nothing)])
    assert runner.calls == []
