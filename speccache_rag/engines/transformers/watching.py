"""Watching what the last tokens of a forward pass attend to, beside the model's own attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speccache_rag.engines.reuse.attention import attention_on_keys


class AttentionWatch:
    """An attention function for Transformers: does what the usual one does, and looks on in the layers that count.

    The usual one is fast and has no probabilities to show; those of a few rows in a few layers cost little.
    """

    def __init__(self, usual: Any, layers: Collection[int], n_rows: int, first_position: int) -> None:
        self._usual = usual
        self._layers = frozenset(layers)
        self._n_rows = n_rows
        self._first_position = first_position
        self.most: torch.Tensor | None = None
        """float32 [Q, T]: of the last Q rows, the maximum over heads and layers of the attention on each key."""

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        """Takes query [1, Hq, S, D], key and value [1, H, T, D]; gives what the usual function gives."""
        if module.layer_idx in self._layers:
            rows, keys = query[0, :, -self._n_rows :].transpose(0, 1), key[0].transpose(0, 1)
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            self.most = attention_on_keys(rows, keys, scale, self._first_position, options.get("softcap"), self.most)
        return self._usual(module, query, key, value, mask, **options)


@contextmanager
def watching(
    model: PreTrainedModel, layers: Collection[int], n_rows: int, first_position: int
) -> Iterator[AttentionWatch]:
    """The model attends through a watch, whose last `n_rows` rows stand at `first_position` and on."""
    usual = model.config._attn_implementation
    # The eager function is no entry of the table; it computes what "sdpa" does.
    watch = AttentionWatch(
        ALL_ATTENTION_FUNCTIONS[usual if usual != "eager" else "sdpa"], layers, n_rows, first_position
    )
    name = f"speccache-watch-{id(watch)}"  # two models may be watched at once
    ALL_ATTENTION_FUNCTIONS[name] = watch
    model.set_attn_implementation(name)
    try:
        yield watch
    finally:
        model.set_attn_implementation(usual)
        ALL_ATTENTION_FUNCTIONS.pop(name)
