"""`speccache report`: tables and figures of a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speccache_rag.cli.output import messages
from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from speccache_rag.evaluation.figures.drawing import Material

TTFT = "ttft.json"
"""What `speccache bench ttft --json` wrote, in the results folder."""


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `speccache eval --out` wrote.")],
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write this figure alone, as DIR/NAME.svg.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="The target model's name, where the folder has several.")
    ] = None,
) -> None:
    """Write DIR/report.md and DIR/report.html: contestants, comparisons at equal cost, figures.

    With DIR/ttft.json, as `speccache bench ttft --json` writes it, also comparisons in equal time.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("A report needs matplotlib.", hint="pip install 'speccache-rag[eval]'") from error
    from speccache_rag.evaluation.figures.drawing import NoData
    from speccache_rag.evaluation.report import drawings, markdown, page, sections

    name, material = _material(folder, target)
    if figure is not None:
        (found,) = drawings(material, [figure]).values()
        if isinstance(found, NoData):
            raise ConfigurationError(f"Figure {figure!r} cannot be drawn: {found}", hint="")
        _write(folder / f"{figure}.svg", found.svg)
        return
    parts, figures = sections(name, material), drawings(material)
    _write(folder / "report.md", markdown(parts, figures))
    _write(folder / "report.html", page(parts, figures))


def _material(folder: Path, target: str | None) -> tuple[str, Material]:
    """The target's name, and what its report is made of."""
    from speccache_rag.evaluation.deviation_records import read
    from speccache_rag.evaluation.figures.drawing import Material
    from speccache_rag.evaluation.records import RUNS, read_records
    from speccache_rag.evaluation.results import by_target

    if not (folder / RUNS).exists():
        raise ConfigurationError(
            f"{str(folder)!r} holds no {RUNS}.", hint="Make it with `speccache eval DATA --out DIR`."
        )
    results = by_target(read_records(folder / RUNS))
    if target is None and len(results) == 1:
        (target,) = results
    if target not in results:
        raise ConfigurationError(
            f"{str(folder)!r} has no records of target {target!r}.", hint=f"Pass --target: {', '.join(results)}."
        )
    deviations = [record for record in read(folder) if record.target == target]
    return target, Material(results[target], _seconds(folder / TTFT, target), deviations)


def _seconds(path: Path, target: str) -> dict[str, float]:
    """Measured times by contestant with its ratio, as shares of full recompute's; none without a measurement."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["label"]: float(row["ttft_median_s"]) for row in value["rows"]}
        return {label: seconds / rows["full_recompute"] for label, seconds in rows.items()}
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigurationError(
            f"{str(path)!r} holds no measured times: {error!r}.", hint="Write it with `speccache bench ttft --json`."
        ) from error


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    messages().print(f"wrote {path}")
