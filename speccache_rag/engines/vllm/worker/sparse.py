"""Native sparse prefill: scattered positions of some requests, computed with vLLM's own model and attention kernels.

Positions form runs of consecutive ones. Each run is one sequence of a varlen batch: its query is the run, its keys are
everything up to the run's end, and its block table is its request's. Every layer writes the KV of all runs before it
attends, so a token at position p sees exactly the keys 0 .. p of its request, fresh where they are recomputed and
reused where they are not (docs/architecture.md). Batches in position order keep that exact, because later runs never
feed earlier ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from speccache_rag.engines.reuse.plan import runs
from speccache_rag.engines.vllm.compat import built
from speccache_rag.engines.vllm.worker.builders import own_groups


class StopForward(Exception):
    """Raised from inside a forward by who has seen enough of it; the batch ends there, the next one starts."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedPrompt:
    """One request as the model sees it."""

    token_ids: np.ndarray
    """int32 [T], the prompt."""
    table: torch.Tensor
    """int64 [blocks], on the CPU."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions `start .. end - 1` of one request."""

    of: PagedPrompt
    start: int
    end: int


def paged(token_ids: Sequence[int], block_ids: Sequence[int]) -> PagedPrompt:
    """A request's tokens and blocks as the model needs them."""
    return PagedPrompt(np.asarray(token_ids, dtype=np.int32), torch.tensor(block_ids, dtype=torch.int64))


class SparsePrefill:
    """Runs the model of a V1 model runner over chosen positions."""

    def __init__(self, runner: GPUModelRunner, block_size: int) -> None:
        self._runner = runner
        self._config = runner.vllm_config
        self.device: torch.device = runner.device
        self._block_size = block_size
        self._groups = own_groups(runner)
        self._max_tokens = self._config.scheduler_config.max_num_batched_tokens
        # GPU backends size scratch tensors by max_num_seqs; the CPU backend sizes them by batch.
        cpu = self.device.type == "cpu"
        self._max_runs = self._max_tokens if cpu else self._config.scheduler_config.max_num_seqs

    def __call__(self, wanted: Sequence[tuple[PagedPrompt, np.ndarray]], *, rope_offset: int = 0) -> None:
        """Compute positions (sorted, unique) of some requests together; their KV cache is updated in place.

        `rope_offset` shifts only the angles of RoPE (used by the self-check).
        """
        pending = [Run(request, start, end) for request, positions in wanted for start, end in runs(positions)]
        for batch in self._batches(pending):
            self._forward(batch, rope_offset)

    def _batches(self, pending: Sequence[Run]) -> Iterator[list[Run]]:
        """Runs packed in order into batches within the limits; a run longer than a batch is cut."""
        batch: list[Run] = []
        room = self._max_tokens
        for run in pending:
            start = run.start
            while start < run.end:
                if room == 0 or len(batch) == self._max_runs:
                    yield batch
                    batch, room = [], self._max_tokens
                end = min(run.end, start + room)
                batch.append(replace(run, start=start, end=end))
                room -= end - start
                start = end
        if batch:
            yield batch

    def _forward(self, batch: Sequence[Run], rope_offset: int) -> None:
        positions = torch.cat([torch.arange(run.start, run.end) for run in batch])
        # int32 like the runner's own input buffer: vLLM's compiled graph runs without guards and was traced with
        # int32, so int64 ids would be read as garbage.
        ids = np.concatenate([run.of.token_ids[run.start : run.end] for run in batch])
        input_ids = torch.from_numpy(ids).to(self.device)
        slots = torch.cat([self._slots(run) for run in batch]).to(self.device)
        common = self._metadata(batch, slots)
        attention, mapping = {}, {}
        for group in self._groups:
            metadata = built(group, self._in_blocks_of(group, common))
            for name in group.layer_names:
                attention[name] = metadata
                mapping[name] = slots
        context = set_forward_context(attention, self._config, num_tokens=len(positions), slot_mapping=mapping)
        with contextlib.suppress(StopForward), context:
            self._runner.model(input_ids=input_ids, positions=positions.to(self.device) + rope_offset)

    def _in_blocks_of(self, group: AttentionGroup, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """With the block table in the group's blocks, which may be smaller than those that vLLM allocates."""
        ratio = self._block_size // group.kv_cache_spec.block_size
        if ratio == 1:
            return common
        parts = torch.arange(ratio, dtype=torch.int32, device=self.device)
        table = (common.block_table_tensor[:, :, None] * ratio + parts).flatten(1)
        return replace(common, block_table_tensor=table)

    def _slots(self, run: Run) -> torch.Tensor:
        positions = torch.arange(run.start, run.end)
        return run.of.table[positions // self._block_size] * self._block_size + positions % self._block_size

    def _metadata(self, batch: Sequence[Run], slots: torch.Tensor) -> CommonAttentionMetadata:
        lengths = torch.tensor([run.end - run.start for run in batch], dtype=torch.int32)
        ends = torch.tensor([run.end for run in batch], dtype=torch.int32)
        starts = torch.zeros(len(batch) + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(lengths, 0)
        width = max(-(-run.end // self._block_size) for run in batch)
        tables = torch.zeros(len(batch), width, dtype=torch.int32)
        for row, run in enumerate(batch):
            part = run.of.table[:width]
            tables[row, : len(part)] = part
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables.to(self.device),
            slot_mapping=slots,
            causal=True,
        )
