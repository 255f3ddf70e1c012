"""Recording keys and values as they pass into vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from speccache_rag.types import ChunkKV

Sink = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with layer index, keys [T, H, D], values [T, H, D], slot mapping [T]."""


class KVRecorder:
    """While attached, shows every KV cache update of every layer to the sinks.

    vLLM offers connectors only the cache tensor, whose layout differs by backend. The one place where keys and values
    are plain [T, H, D] is the attention implementation's `do_kv_cache_update`, so an instance attribute stands in
    front of it, for the steps that need it and no longer.
    """

    def __init__(self, layers: Mapping[str, Attention]) -> None:
        self._impls: list[Any] = [layer.impl for layer in layers.values()]
        self._sinks: list[Sink] = []

    def attach(self, sinks: Sequence[Sink]) -> None:
        """Start showing updates to `sinks`, at least one."""
        self.detach()
        for index, impl in enumerate(self._impls):
            impl.do_kv_cache_update = self._tap(index, impl.do_kv_cache_update, sinks)
        self._sinks = list(sinks)

    def detach(self) -> None:
        """Stop. Idempotent."""
        if self._sinks:
            for impl in self._impls:
                # Removes our instance attribute; the class's method is underneath.
                del impl.do_kv_cache_update
        self._sinks = []

    @contextmanager
    def watching(self, sinks: Sequence[Sink]) -> Iterator[None]:
        """Attached for the time of a `with`, besides whoever is attached already."""
        before = self._sinks
        self.attach([*before, *sinks])
        try:
            yield
        finally:
            self.attach(before) if before else self.detach()

    @staticmethod
    def _tap(index: int, update: Callable[..., None], sinks: Sequence[Sink]) -> Callable[..., None]:
        def tapped(
            layer: Attention, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            for sink in sinks:
                sink(index, key, value, slots)
            update(layer, key, value, kv_cache, slots)

        return tapped


class CaptureBuffer:
    """Collects one chunk's KV over the steps of its prefill, wherever its rows stand in the batches."""

    def __init__(self, token_ids: Sequence[int], position: int, n_layers: int) -> None:
        self._token_ids = tuple(token_ids)
        self._position = position
        self._n_layers = n_layers
        self._seen = torch.zeros(n_layers, len(token_ids), dtype=torch.bool)
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._wanted = self._tokens = torch.empty(0, dtype=torch.int64)
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def expect(self, slots: torch.Tensor) -> None:
        """Slots of the chunk's tokens in this step, on the CPU; fewer than T while blocks are still being allocated."""
        self._wanted, self._tokens = slots.sort()
        self._rows = {}

    def record(self, index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """A sink for `KVRecorder`. Rows are gathered on the device that computed them."""
        rows, tokens = self._rows_of(slots[: keys.shape[0]])
        if not len(rows):
            return
        if self._keys is None or self._values is None:
            shape = (self._n_layers, len(self._token_ids), *keys.shape[1:])
            self._keys = keys.new_full(shape, float("nan"))
            self._values = values.new_full(shape, float("nan"))
        self._keys[index, tokens] = keys[rows]
        self._values[index, tokens] = values[rows]
        self._seen[index, tokens] = True

    def _rows_of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a batch that are the chunk's, and the tokens they are; looked up once a step, not once a layer."""
        found = self._rows.get(slots.data_ptr())
        if found is None:
            here = slots.cpu()
            at = torch.searchsorted(self._wanted, here).clamp(max=max(0, len(self._wanted) - 1))
            same = self._wanted[at] == here if len(self._wanted) else torch.zeros(len(here), dtype=torch.bool)
            rows = torch.nonzero(same).flatten()
            found = self._rows[slots.data_ptr()] = rows, self._tokens[at[rows]] if len(rows) else rows
        return found

    @property
    def complete(self) -> bool:
        """Whether every layer of every token was recorded."""
        return bool(self._seen.all())

    def chunk_kv(self) -> ChunkKV:
        """What was recorded.

        Raises:
            ValueError: it is not complete.
        """
        if not self.complete:
            raise ValueError(f"{int((~self._seen).sum())} of {self._seen.numel()} rows were not recorded")
        return self.partial()

    def partial(self) -> ChunkKV:
        """What was recorded, NaN elsewhere.

        Raises:
            ValueError: nothing was.
        """
        if self._keys is None or self._values is None:
            raise ValueError("no row was recorded")
        return ChunkKV(self._keys.cpu(), self._values.cpu(), self._token_ids, self._position)
