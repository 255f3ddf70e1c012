"""Ranges of a scoring model's layers, by name."""

from __future__ import annotations

from typing import Literal, get_args

from speccache_rag.errors import ConfigurationError

LayerRange = Literal["all", "last_two_thirds", "last_third", "last"]
"""The last third is what the paper calls deep (section 2.2)."""


def counted_layers(n_layers: int, layers: LayerRange) -> range:
    """The counted layers of a model of `n_layers` (S), indices from 0; at least one.

    "last_third" is the paper's S - floor(S/3) + 1 .. S, counted from 1.

    Raises:
        ConfigurationError: the name is unknown.
    """
    sizes = {"all": n_layers, "last_two_thirds": 2 * n_layers // 3, "last_third": n_layers // 3, "last": 1}
    if layers not in sizes:
        raise ConfigurationError(f"layers is {layers!r}; it must be one of {', '.join(get_args(LayerRange))}.")
    return range(n_layers - max(1, sizes[layers]), n_layers)
