"""Quality against cost: KL and answers by computed tokens, KL by measured seconds, KL by ratio."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from speccache_rag.evaluation.figures.drawing import COLORS, Drawing, Material, NoData, canvas, drawn
from speccache_rag.evaluation.frontier import Costs, points, token_costs
from speccache_rag.evaluation.records import FULL
from speccache_rag.evaluation.results import MEASURES, REUSE, Results


def frontier(material: Material) -> Drawing:
    """KL from full recompute by computed tokens."""
    figure, axes = canvas()
    _kl_lines(axes, material.results, token_costs(material.results))
    axes.set_xlabel("tokens computed before the first new one, scoring included, as a share of the prompt")
    return drawn(figure, "Quality by tokens computed", "Left and low is good. Bars: 95 % intervals of the mean.")


def seconds(material: Material) -> Drawing:
    """KL from full recompute by measured time to first token.

    Raises:
        NoData: no measurement lies in the folder.
    """
    costs = {label: cost for label, cost in material.seconds.items() if label in material.results.by_label}
    if len(set(costs) - {FULL, REUSE}) < 1:
        raise NoData("No measured times: run `speccache bench ttft --json DIR/ttft.json`.")
    figure, axes = canvas()
    _kl_lines(axes, material.results, costs)
    axes.set_xlabel("time to first token, scoring included, as a share of full recompute's")
    return drawn(figure, "Quality by seconds", "Times from ttft.json. Bars: 95 % intervals of the mean.")


def answers(material: Material) -> Drawing:
    """The quality of answers by computed tokens.

    Raises:
        NoData: no example has a reference answer.
    """
    rows = [row for row in material.results.rows() if row.measures]
    if not rows:
        raise NoData("No example has a reference answer.")
    measure = next(name for name in MEASURES if any(name in row.measures for row in rows))
    costs = token_costs(material.results)
    figure, axes = canvas()
    by_label = {row.label: row for row in rows}
    for color, (family, labels) in zip(_colors(), material.results.families.items(), strict=False):
        here = sorted((costs[label], by_label[label].measures[measure]) for label in labels if label in by_label)
        axes.plot(*zip(*here, strict=True), "o-", color=color, label=family, markersize=4)
    for label, style in ((FULL, "-"), (REUSE, ":")):
        if label in by_label:
            axes.axhline(by_label[label].measures[measure], color="#888888", linestyle=style, label=label)
    axes.set_xlabel("tokens computed, as a share of the prompt")
    axes.set_ylabel(measure)
    _legend(axes)
    return drawn(figure, "Answers by tokens computed", f"Mean {measure} over the examples that have an answer.")


def ratios(material: Material) -> Drawing:
    """Mean and median KL by recompute ratio.

    Raises:
        NoData: no contestant ran at two ratios.
    """
    results = material.results
    families = {name: labels for name, labels in results.families.items() if len(labels) > 1}
    if not families:
        raise NoData("No contestant ran at two ratios: run `speccache eval` with --ratios 0.05,0.15,0.3.")
    figure, axes = canvas()
    rows = {row.label: row for row in results.rows()}
    for color, (family, labels) in zip(_colors(), families.items(), strict=False):
        here = [rows[label] for label in labels]
        ratio = [row.effective_ratio for row in here]
        axes.plot(ratio, [row.kl_mean for row in here], "o-", color=color, label=family, markersize=4)
        axes.plot(ratio, [row.kl_median for row in here], "o:", color=color, markersize=3)
    axes.set_xlabel("effective recompute ratio")
    axes.set_ylabel("KL, nats")
    _legend(axes)
    return drawn(figure, "Ratio sweep", "Lines: mean over examples. Dots: median.")


def _kl_lines(axes: Axes, results: Results, costs: Costs) -> None:
    """One line for each contestant, and the point where nothing is recomputed."""
    for color, family in zip(_colors(), results.families, strict=False):
        here = points(results, family, costs)
        if not here:
            continue
        at, means = [p.cost for p in here], np.array([p.mean for p in here])
        reach = np.array([[p.mean - p.low, p.high - p.mean] for p in here]).T
        reach = np.where(np.isfinite(reach), reach, 0.0)
        axes.errorbar(
            at, means, yerr=reach, fmt="o-", color=color, label=family, markersize=4, elinewidth=0.8, capsize=2
        )
    reuse = [row for row in results.rows() if row.label == REUSE]
    if reuse and REUSE in costs:
        axes.plot([costs[REUSE]], [reuse[0].kl_mean], "kD", markersize=5, label="nothing recomputed")
    axes.set_ylabel("KL from full recompute, nats")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)


def _colors() -> list[str]:
    return list(COLORS) * 8
