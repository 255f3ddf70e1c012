"""What a policy's options and scorers change: layers, span completion, thresholds, speculative models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from speccache_rag.evaluation.figures.drawing import COLORS, Drawing, Material, NoData, canvas, drawn
from speccache_rag.evaluation.records import Record
from speccache_rag.evaluation.results import Results
from speccache_rag.evaluation.statistics import mean_interval
from speccache_rag.selection.expression import parse_expression

RANGES = ("all", "last_two_thirds", "last_third", "last")


def layers(material: Material) -> Drawing:
    """KL by the layers whose scores count.

    Raises:
        NoData: no policy ran with two layer ranges.
    """
    found = _by_option(material.results, "layers", "last_third")
    told = {f"{base}, {value}": labels for base, values in found.items() for value, labels in _ordered(values)}
    return _bars(material.results, told, "Layer range", "speccache eval DATA --study layers")


def spans(material: Material) -> Drawing:
    """KL with and without span completion; its legend gives the tokens that completion adds.

    Raises:
        NoData: no policy ran both ways.
    """
    found = _by_option(material.results, "complete", True)
    told = {
        f"{base}, {'completed' if value is True else 'not completed'}": labels
        for base, values in found.items()
        for value, labels in values.items()
    }
    return _bars(material.results, told, "Span completion", "speccache eval DATA --study spans")


def scorers(material: Material) -> Drawing:
    """KL by the model that scores.

    Raises:
        NoData: no policy ran with two scorers.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for label, records in material.results.by_label.items():
        one = next(iter(records.values()))
        if one.scoring is not None and one.scoring != "deviation":
            base, scorer = _scorer(one)
            groups.setdefault(f"{base}@{one.recompute_ratio:g}", {}).setdefault(scorer, []).append(label)
    told = {
        f"{base}, {name}": labels for base, group in groups.items() if len(group) > 1 for name, labels in group.items()
    }
    return _bars(material.results, told, "Who scores", "speccache eval DATA --study scorers --also-speculative MODEL")


def tau(material: Material) -> Drawing:
    """Mean KL by the two thresholds of span completion.

    Raises:
        NoData: `speccache` ran with fewer than two values of each.
    """
    found: dict[tuple[float, float], list[float]] = {}
    for records in material.results.by_label.values():
        one = next(iter(records.values()))
        last = parse_expression(one.policy)[-1]
        if last.name == "speccache":
            key = float(last.named.get("tau_smooth", 0.4)), float(last.named.get("tau_cover", 0.7))
            found.setdefault(key, []).extend(record.kl for record in records.values())
    smooth, cover = (sorted({key[axis] for key in found}) for axis in (0, 1))
    if len(smooth) < 2 or len(cover) < 2:
        raise NoData("speccache ran with one threshold only: run `speccache eval DATA --study tau`.")
    grid = np.array([[np.mean(found.get((s, c), [np.nan])) for s in smooth] for c in cover])
    figure, axes = canvas(5.6, 4.2)
    image = axes.imshow(grid, cmap="viridis_r", origin="lower", aspect="auto")
    axes.set_xticks(range(len(smooth)), [f"{s:g}" for s in smooth])
    axes.set_yticks(range(len(cover)), [f"{c:g}" for c in cover])
    axes.set_xlabel("tau_smooth")
    axes.set_ylabel("tau_cover")
    axes.grid(visible=False)
    figure.colorbar(image, label="mean KL, nats")
    return drawn(figure, "Thresholds of span completion", "Darker is closer to full recompute.")


def _scorer(record: Record) -> tuple[str, str]:
    """A policy without its scorer, and the scorer."""
    if record.speculative_model is not None:
        return record.contestant.partition(" by ")[0], record.speculative_model
    target = "the target"
    return record.policy.replace("(target)", "").replace("(scorer=target)", ""), target


def _by_option(results: Results, option: str, default: object) -> dict[str, dict[object, list[str]]]:
    """Labels by what is the same in them, then by an option of the last policy; only where there are two values."""
    found: dict[str, dict[object, list[str]]] = {}
    for label, records in results.by_label.items():
        one = next(iter(records.values()))
        last = parse_expression(one.policy)[-1]
        if last.name in ("speccache", "attended"):
            rest = {key: value for key, value in last.named.items() if key != option}
            who = "".join(f" {value}" for value in (*last.positional, *rest.values()))
            base = f"{last.name}{who}@{one.recompute_ratio:g}"
            found.setdefault(base, {}).setdefault(last.named.get(option, default), []).append(label)
    return {base: values for base, values in found.items() if len(values) > 1}


def _ordered(values: Mapping[object, list[str]]) -> Sequence[tuple[object, list[str]]]:
    place: Callable[[object], int] = lambda name: RANGES.index(str(name)) if name in RANGES else len(RANGES)  # noqa: E731
    return sorted(values.items(), key=lambda item: place(item[0]))


def _bars(results: Results, told: Mapping[str, Sequence[str]], title: str, command: str) -> Drawing:
    """One bar for each name, over all records of its labels."""
    if len(told) < 2:
        raise NoData(f"Nothing to compare here: run `{command}`.")
    kl = {n: [r.kl for label in labels for r in results.by_label[label].values()] for n, labels in told.items()}
    figure, axes = canvas(7.2, 1.0 + 0.42 * len(kl))
    means = [float(np.mean(values)) for values in kl.values()]
    ends = [mean_interval(values) for values in kl.values()]
    reach = np.array([[m - low, high - m] for m, (low, high) in zip(means, ends, strict=True)]).T
    reach = np.where(np.isfinite(reach), reach, 0.0)
    axes.barh(list(kl), means, xerr=reach, color=COLORS[0], ecolor="#333333", capsize=2, height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("mean KL from full recompute, nats")
    return drawn(figure, title, "Shorter is closer to full recompute. Bars: 95 % intervals of the mean.")
