"""Where stored KV is wrong: by layer, and by the place of a token in its chunk."""

from __future__ import annotations

import numpy as np

from speccache_rag.evaluation.deviation_records import OFFSETS, DeviationRecord
from speccache_rag.evaluation.figures.drawing import COLORS, Drawing, Material, NoData, canvas, drawn

MISSING = "No deviations: run `speccache eval DATA --study deviation`."


def by_layer(material: Material) -> Drawing:
    """Deviation of stored from true KV by layer.

    Raises:
        NoData: none were measured.
    """
    if not material.deviations:
        raise NoData(MISSING)
    figure, axes = canvas()
    for color, (of, records) in zip(COLORS, _by_kind(material).items(), strict=False):
        layers = sorted({record.layer for record in records})
        means = [float(np.mean([r.mean for r in records if r.layer == layer])) for layer in layers]
        axes.plot(layers, means, "o-", color=color, label=f"{of}s", markersize=3)
    axes.set_xlabel("layer index")
    axes.set_ylabel("squared deviation, mean over tokens")
    axes.set_yscale("log")
    axes.legend()
    return drawn(figure, "Deviation by layer", "Stored KV against KV of a full prefill, mean over chunk tokens.")


def by_offset(material: Material) -> Drawing:
    """Deviation by a token's offset in its chunk, chunks with exact KV left out.

    Raises:
        NoData: none were measured.
    """
    if not material.deviations:
        raise NoData(MISSING)
    figure, axes = canvas()
    for color, (of, records) in zip(COLORS, _by_kind(material).items(), strict=False):
        shares = [_shares(record) for record in records]
        means = [_mean([share[place] for share in shares]) for place in range(len(OFFSETS))]
        known = [(place, mean) for place, mean in enumerate(means) if mean is not None]
        axes.plot(*zip(*known, strict=True), "o-", color=color, label=f"{of}s", markersize=4)
    axes.set_xticks(range(len(OFFSETS)), [f"{low}" if high == low + 1 else f"{low}+" for low, high in OFFSETS])
    axes.set_xlabel("offset in the chunk, tokens")
    axes.set_ylabel("deviation, mean of the chunk = 1")
    axes.set_ylim(bottom=0)
    axes.legend()
    return drawn(figure, "Deviation by offset", "Averaged over layers and examples; each counts alike.")


def _by_kind(material: Material) -> dict[str, list[DeviationRecord]]:
    found: dict[str, list[DeviationRecord]] = {}
    for record in material.deviations:
        found.setdefault(record.of, []).append(record)
    return found


def _shares(record: DeviationRecord) -> list[float | None]:
    """Deviation in each range of offsets as a multiple of the mean over them; None where no token is."""
    mean = _mean(list(record.by_offset)) or 1.0
    return [None if value is None else value / mean for value in record.by_offset]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
