"""`Drawing`: one figure as SVG with its caption, and what all figures share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from speccache_rag.evaluation.deviation_records import DeviationRecord
from speccache_rag.evaluation.frontier import Costs
from speccache_rag.evaluation.results import Results

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#444444")
"""Told apart by colour-blind readers too (Okabe and Ito)."""

STYLE: Any = {  # keys are matplotlib's own list of names
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: small, sharp, and can be searched
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


class NoData(Exception):
    """Nothing to draw a figure from; the message says which command makes the data."""


@dataclass(frozen=True, slots=True)
class Material:
    """What a report is made of: one target's results, and what else lies in the folder."""

    results: Results
    seconds: Costs = field(default_factory=dict)
    """Measured time to first token, as a share of full recompute's."""
    deviations: Sequence[DeviationRecord] = ()


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure."""

    title: str
    caption: str
    svg: str


def canvas(width: float = 7.2, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()


def drawn(figure: Figure, title: str, caption: str) -> Drawing:
    """The finished figure; the same data give the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Drawing(title, caption, text[text.index("<svg") :])
