"""The model that vLLM has loaded in this rank, and what reuse needs of it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from speccache_rag.engines.reuse.fill import KVShape
from speccache_rag.engines.vllm.support import attention_layers, rope_tables
from speccache_rag.engines.vllm.worker.paging import KVWriter
from speccache_rag.engines.vllm.worker.ranks import heads_of_rank
from speccache_rag.engines.vllm.worker.recorder import KVRecorder
from speccache_rag.engines.vllm.worker.sparse import SparsePrefill


class LoadedModel:
    """Layers, rotations, cache shape, and the three tools that work on them: writer, recorder, sparse prefill."""

    def __init__(self, runner: GPUModelRunner, block_size: int) -> None:
        """Look at the loaded layers.

        Raises:
            UnsupportedModel: it has layers whose KV cannot be moved.
        """
        self.layers = attention_layers(runner)
        self.ropes = rope_tables(runner.model, self.layers)
        self.device: torch.device = runner.device
        dtype = runner.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        first = next(iter(self.layers.values()))
        n_heads = runner.model_config.get_total_num_kv_heads()
        self.shape = KVShape(len(self.layers), n_heads, int(first.head_size), dtype)
        self.heads = heads_of_rank(n_heads)
        self.writer = KVWriter(self.layers, self.ropes, self.heads, self.device)
        self.recorder = KVRecorder(self.layers)
        self.prefill = SparsePrefill(runner, block_size)

    @property
    def impls(self) -> list[Any]:
        """The attention implementations, in layer order."""
        return [layer.impl for layer in self.layers.values()]
