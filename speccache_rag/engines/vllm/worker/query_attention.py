"""The answer to `QueryAttention`: what the query attends to, over chunk KV reused as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from speccache_rag.engines.reuse.attention import QUERY_TOKENS, attention_on_keys
from speccache_rag.engines.vllm.worker.ranks import max_over_ranks
from speccache_rag.scoring.layers import counted_layers
from speccache_rag.scoring.questions import QueryAttention

if TYPE_CHECKING:
    from speccache_rag.engines.vllm.worker.fills import RunningFill
    from speccache_rag.engines.vllm.worker.model import LoadedModel


def query_attention(model: LoadedModel, fill: RunningFill, question: QueryAttention) -> np.ndarray:
    """float32 [T]. Loads all chunks, computes what is in none, and watches the prompt's last tokens."""
    n = len(fill.job.plan.token_ids)
    end = fill.job.plan.fill_end
    first = max(end, n - QUERY_TOKENS)
    counted = counted_layers(len(model.layers), question.layers)
    keys = KeyBuffer(counted, fill.slots)
    with model.recorder.watching([keys.record]):
        fill.write(model.writer)
        model.prefill([(fill.prompt, np.concatenate((fill.job.positions, np.arange(end, first))))])
        with _queries(model, counted) as queries:
            model.prefill([(fill.prompt, np.arange(first, n))])
    most: torch.Tensor | None = None
    for index in counted:
        impl: Any = model.impls[index]
        soft_cap = getattr(impl, "logits_soft_cap", None)
        rows = torch.cat(queries[index])
        most = attention_on_keys(rows, keys.of(index), float(impl.scale), first, soft_cap, most)
    assert most is not None
    return max_over_ranks(most).mean(dim=0).cpu().numpy()


class KeyBuffer:
    """Collects the keys of one request in the counted layers, where its positions are written."""

    def __init__(self, counted: range, slots: torch.Tensor) -> None:
        self._wanted, self._positions = slots.sort()
        self._keys: dict[int, torch.Tensor | None] = dict.fromkeys(counted)

    def record(self, index: int, keys: torch.Tensor, _values: torch.Tensor, slots: torch.Tensor) -> None:
        """A sink for `KVRecorder`."""
        if index not in self._keys:
            return
        buffer = self._keys[index]
        if buffer is None:
            buffer = self._keys[index] = keys.new_zeros((len(self._wanted), *keys.shape[1:]))
        at = torch.searchsorted(self._wanted, slots).clamp(max=len(self._wanted) - 1)
        here = self._wanted[at] == slots
        buffer[self._positions[at[here]]] = keys[: len(slots)][here]

    def of(self, index: int) -> torch.Tensor:
        """[T, H, D]: the keys of a counted layer."""
        keys = self._keys[index]
        assert keys is not None
        return keys


@contextmanager
def _queries(model: LoadedModel, counted: range) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Collects the queries [rows, Hq, D] that reach the attention of the counted layers, by layer index.

    Like `KVRecorder`, an instance attribute in front of the backend's own method, for the time of the `with`.
    """
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in counted}

    def tap(index: int, forward: Any) -> Any:
        def tapped(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows[index].append(query.clone())
            return forward(layer, query, *args, **kwargs)

        return tapped

    for index in counted:
        model.impls[index].forward = tap(index, model.impls[index].forward)
    try:
        yield rows
    finally:
        for index in counted:
            del model.impls[index].forward
