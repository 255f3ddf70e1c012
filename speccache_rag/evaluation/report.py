"""The report of a results folder: Markdown, and one HTML page with the figures in it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from speccache_rag.evaluation.figures import FIGURES
from speccache_rag.evaluation.figures.drawing import Drawing, Material, NoData
from speccache_rag.evaluation.frontier import at_equal_cost, token_costs
from speccache_rag.evaluation.records import FULL
from speccache_rag.evaluation.results import REUSE, Results, Row, kl_of
from speccache_rag.evaluation.statistics import Difference

Table = list[list[str]]
"""Rows of cells; the first row is the header."""


def sections(target: str, material: Material) -> list[tuple[str, str, Table]]:
    """Heading, remark and table of each part of a report."""
    results = material.results
    n = {dataset: len(results.of(dataset).by_label.get(FULL, {})) for dataset in results.datasets}
    told = ", ".join(f"{dataset} {count}" for dataset, count in n.items())
    found = [
        (
            f"Contestants, target {target}",
            f"Examples: {told}. Computed: tokens before the first new one, scoring included, as a share of the prompt. "
            "Runs: stretches of consecutive computed positions. KL in nats from full recompute, along its answer. "
            "Difference: KL less that of recomputing nothing, paired, with its 95 % interval.",
            contestants_table(results),
        )
    ]
    found += [(f"Contestants, {dataset}", "", contestants_table(results.of(dataset))) for dataset in n if len(n) > 1]
    found.append(
        (
            "At the same cost",
            "KL of the row's contestant less that of the column's at the row's cost in tokens (read between its "
            "ratios). 'Within noise' means that the interval holds zero; the number is the examples that would decide.",
            equal_cost_table(material, seconds=False),
        )
    )
    if set(material.seconds) & set(results.by_label) - {FULL, REUSE}:
        remark = "As above, at the row's measured time to first token."
        found.append(("In the same time", remark, equal_cost_table(material, seconds=True)))
    return [part for part in found if len(part[2]) > 1]


def contestants_table(results: Results) -> Table:
    """One line for each contestant, cheapest first."""
    rows = sorted(results.rows(), key=lambda row: row.computed)
    names = sorted({name for row in rows for name in row.measures})
    head = ["contestant", "n", "computed", "ratio", "runs", "KL mean", "median", "agreement", "NLL", *names]
    return [[*head, "difference", "closer"], *(_cells(row, names) for row in rows)]


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    versus = row.against_reuse
    return [
        row.label,
        str(row.n),
        f"{row.computed:.3f}",
        f"{row.effective_ratio:.3f}",
        f"{row.runs:.0f}",
        f"{row.kl_mean:.3f}",
        f"{row.kl_median:.3f}",
        f"{row.agreement:.3f}",
        "" if row.nll is None else f"{row.nll:.2f}",
        *(f"{row.measures[name]:.3f}" if name in row.measures else "" for name in names),
        "" if versus is None else told(versus),
        "" if versus is None else f"{versus.lower} of {versus.n}",
    ]


def told(difference: Difference) -> str:
    """A difference in words and numbers."""
    if math.isinf(difference.low):
        return f"{difference.mean:+.3f} (n = {difference.n}: too few)"
    text = f"{difference.mean:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"
    if difference.verdict != "within noise":
        return text
    needed = "" if difference.needed is None else f", n = {difference.needed:,} would decide"
    return f"{text}, within noise{needed}"


def equal_cost_table(material: Material, *, seconds: bool) -> Table:
    """Every contestant against every other one at its own cost."""
    results = material.results
    costs = material.seconds if seconds else token_costs(results)
    families = list(results.families)
    table = [["contestant", *families]]
    for label in (label for labels in results.families.values() for label in labels):
        own = next(iter(results.by_label[label].values())).contestant
        found = [None if name == own else at_equal_cost(results, label, name, costs) for name in families]
        if any(found):
            table.append([label, *("" if cell is None else told(cell) for cell in found)])
    return table


def pairwise(results: Results, first: str) -> list[tuple[str, Difference]]:
    """One contestant against every other with records of the same examples."""
    others = ((label, results.difference(first, label, kl_of)) for label in results.by_label if label != first)
    return [(label, difference) for label, difference in others if difference is not None]


def drawings(material: Material, names: Iterable[str] | None = None) -> dict[str, Drawing | NoData]:
    """The figures by name, all of them where none is named; a `NoData` stands where there is nothing to draw."""
    found: dict[str, Drawing | NoData] = {}
    for name in FIGURES.names() if names is None else names:
        try:
            found[name] = FIGURES.load(name)(material)
        except NoData as missing:
            found[name] = missing
    return found


def markdown(parts: Sequence[tuple[str, str, Table]], figures: dict[str, Drawing | NoData]) -> str:
    """The report as Markdown; figures are named, and are in the page."""
    lines = ["# Evaluation report", ""]
    for heading, remark, table in parts:
        lines += [f"## {heading}", "", *([remark, ""] if remark else []), *_markdown_table(table), ""]
    lines += [
        "## Figures",
        "",
        "They are in report.html; each is made alone by `speccache report DIR --figure NAME`.",
        "",
    ]
    for name, figure in figures.items():
        lines.append(f"- `{name}`: {figure.title if isinstance(figure, Drawing) else figure}")
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in table]
    ruler = ["---", *("---:" for _ in cells[0][1:])]
    return [f"| {' | '.join(row)} |" for row in (cells[0], ruler, *cells[1:])]


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
figure { background: #fff; color: #222; padding: 1rem; margin: 1.5rem 0; border-radius: 6px; border: 1px solid #8884; }
figure svg { max-width: 100%; height: auto; }
figcaption { font-size: 13px; }
"""


def page(parts: Sequence[tuple[str, str, Table]], figures: dict[str, Drawing | NoData]) -> str:
    """The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""
    body = ["<h1>Evaluation report</h1>"]
    drawn = [figure for figure in figures.values() if isinstance(figure, Drawing)]
    for heading, remark, table in parts[:1]:
        body += _html_part(heading, remark, table)
    for figure in drawn:
        caption = f"<b>{html.escape(figure.title)}.</b> {html.escape(figure.caption)}"
        body.append(f"<figure>{figure.svg}<figcaption>{caption}</figcaption></figure>")
    for heading, remark, table in parts[1:]:
        body += _html_part(heading, remark, table)
    missing = [(name, figure) for name, figure in figures.items() if not isinstance(figure, Drawing)]
    if missing:
        items = "".join(f"<li><code>{name}</code>: {html.escape(str(why))}</li>" for name, why in missing)
        body.append(f"<h2>Not drawn</h2><ul>{items}</ul>")
    head = f'<meta charset="utf-8"><title>Evaluation report</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _html_part(heading: str, remark: str, table: Table) -> list[str]:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table[0])
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table[1:])
    remark = f"<p>{html.escape(remark)}</p>" if remark else ""
    return [f"<h2>{html.escape(heading)}</h2>{remark}<table><tr>{head}</tr>{rows}</table>"]
