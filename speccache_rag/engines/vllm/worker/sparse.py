"""Native sparse prefill: recompute scattered positions of one request with vLLM's own model and attention kernels.

Positions form runs of consecutive ones. Each run is one sequence of a varlen batch: its query is the run, its keys are
everything up to the run's end, and all sequences share the request's block table. Every layer writes the KV of all runs
before it attends, so a token at position p sees exactly the keys 0 .. p, fresh where they are recomputed and reused
where they are not (design section 5). Slices in position order keep that exact, because later runs never feed earlier
ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from speccache_rag.engines.reuse.plan import runs


class StopForward(Exception):
    """Raised from inside a forward by who has seen enough of it; the batch ends there, the next one starts."""


class SparsePrefill:
    """Runs the model of a V1 model runner over chosen positions."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._config = runner.vllm_config
        self._device = runner.device
        self._max_tokens = self._config.scheduler_config.max_num_batched_tokens
        # GPU backends size scratch tensors by max_num_seqs; the CPU backend sizes them by batch.
        cpu = self._device.type == "cpu"
        self._max_runs = self._max_tokens if cpu else self._config.scheduler_config.max_num_seqs

    def __call__(
        self,
        token_ids: Sequence[int],
        positions: np.ndarray,
        block_ids: Sequence[int],
        slots: torch.Tensor,
        *,
        rope_offset: int = 0,
    ) -> None:
        """Recompute `positions` (sorted, unique) of a request; its KV cache is updated in place.

        `slots` is indexed by position. `rope_offset` shifts only the angles of RoPE (used by the self-check).
        """
        table = torch.tensor(block_ids, dtype=torch.int32, device=self._device)
        ids = np.asarray(token_ids, dtype=np.int32)
        for piece in self._slices(runs(positions)):
            self._forward(ids, piece, table, slots, rope_offset)

    def _slices(self, pending: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Runs packed in order into batches within the limits; a run longer than a batch is cut."""
        batch: list[tuple[int, int]] = []
        room = self._max_tokens
        for start, end in pending:
            while start < end:
                if room == 0 or len(batch) == self._max_runs:
                    yield batch
                    batch, room = [], self._max_tokens
                stop = min(end, start + room)
                batch.append((start, stop))
                room -= stop - start
                start = stop
        if batch:
            yield batch

    def _forward(
        self,
        ids: np.ndarray,
        batch: list[tuple[int, int]],
        table: torch.Tensor,
        slots: torch.Tensor,
        rope_offset: int,
    ) -> None:
        positions = torch.cat([torch.arange(start, end, dtype=torch.int64) for start, end in batch])
        # int32 like the runner's own input buffer: vLLM's compiled graph runs without guards and was traced with
        # int32, so int64 ids would be read as garbage.
        input_ids = torch.from_numpy(ids[positions.numpy()]).to(self._device)
        positions = positions.to(self._device)
        slot_mapping = slots[positions]
        common = self._metadata(batch, table, slot_mapping)
        attention, mapping = {}, {}
        for group in self._runner.attn_groups[0]:
            built = group.get_metadata_builder().build(0, common)
            for name in group.layer_names:
                attention[name] = built
                mapping[name] = slot_mapping
        context = set_forward_context(attention, self._config, num_tokens=len(positions), slot_mapping=mapping)
        with contextlib.suppress(StopForward), context:
            self._runner.model(input_ids=input_ids, positions=positions + rope_offset)

    def _metadata(
        self, batch: list[tuple[int, int]], table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CommonAttentionMetadata:
        lengths = torch.tensor([end - start for start, end in batch], dtype=torch.int32)
        ends = torch.tensor([end for _, end in batch], dtype=torch.int32)
        starts = torch.zeros(len(batch) + 1, dtype=torch.int32)
        starts[1:] = torch.cumsum(lengths, 0)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self._device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(batch),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.expand(len(batch), -1).contiguous(),
            slot_mapping=slot_mapping,
            causal=True,
        )
