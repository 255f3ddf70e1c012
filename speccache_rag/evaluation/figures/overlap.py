"""How much of two contestants' selections is the same."""

from __future__ import annotations

import numpy as np

from speccache_rag.evaluation.figures.drawing import Drawing, Material, NoData, canvas, drawn
from speccache_rag.evaluation.records import FULL, unpack
from speccache_rag.evaluation.results import REUSE, Case, Results


def overlap(material: Material) -> Drawing:
    """Mean Jaccard index of the selections of each two contestants at the ratio that most of them share.

    Raises:
        NoData: fewer than two contestants kept their selections.
    """
    chosen = _selections(material.results)
    if len(chosen) < 2:
        raise NoData("Fewer than two contestants kept their selections at one ratio.")
    names = list(chosen)
    grid = np.array([[_jaccard(chosen[a], chosen[b]) for b in names] for a in names])
    figure, axes = canvas(2.6 + 0.55 * len(names), 1.8 + 0.5 * len(names))
    image = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.grid(visible=False)
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            color = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, label="Jaccard index", shrink=0.8)
    return drawn(figure, "Overlap of selections", "1: the same tokens. Mean over examples.")


def _selections(results: Results) -> dict[str, dict[Case, np.ndarray]]:
    """Selected tokens of each contestant at the commonest ratio, by example."""
    by_ratio: dict[float, dict[str, dict[Case, np.ndarray]]] = {}
    for label, records in results.by_label.items():
        if label in (FULL, REUSE):
            continue
        kept = {case: unpack(r.selected, r.chunk_tokens) for case, r in records.items() if r.selected is not None}
        if kept:
            by_ratio.setdefault(next(iter(records.values())).recompute_ratio, {})[label] = kept
    return max(by_ratio.values(), key=len, default={})


def _jaccard(first: dict[Case, np.ndarray], second: dict[Case, np.ndarray]) -> float:
    shared = [case for case in first if case in second]
    values = [(first[c] & second[c]).sum() / max(1, (first[c] | second[c]).sum()) for c in shared]
    return float(np.mean(values)) if values else float("nan")
