"""Figures of a report: each is drawn from the results folder by its name."""

from __future__ import annotations

from speccache_rag.registry import Registry

FIGURES = Registry(
    "figure",
    {
        "frontier": "speccache_rag.evaluation.figures.frontier:frontier",
        "answers": "speccache_rag.evaluation.figures.frontier:answers",
        "seconds": "speccache_rag.evaluation.figures.frontier:seconds",
        "ratios": "speccache_rag.evaluation.figures.frontier:ratios",
        "layers": "speccache_rag.evaluation.figures.options:layers",
        "spans": "speccache_rag.evaluation.figures.options:spans",
        "tau": "speccache_rag.evaluation.figures.options:tau",
        "scorers": "speccache_rag.evaluation.figures.options:scorers",
        "overlap": "speccache_rag.evaluation.figures.overlap:overlap",
        "deviation_layers": "speccache_rag.evaluation.figures.deviation:by_layer",
        "deviation_offsets": "speccache_rag.evaluation.figures.deviation:by_offset",
    },
)
"""Each a function from `Material` to a `Drawing`, which raises `NoData` where there is nothing to draw."""

__all__ = ["FIGURES"]
