"""What the demo prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from speccache_rag.cli.output import TTFT_PARTS

if TYPE_CHECKING:
    from speccache_rag.cli.demo.comparison import Comparison

COUNTS = ("matched", "loaded", "recomputed", "fresh", "missed")


def answers_table(label: str, comparison: Comparison) -> Table:
    """Both answers side by side, with their times to first token."""
    table = Table(
        title=Text(f"{label}. {comparison.question}", style="bold"), title_justify="left", show_lines=True, expand=True
    )
    table.add_column(f"full recompute, first token after {comparison.full.ttft_s:.2f} s", ratio=1)
    table.add_column(
        f"reuse, first token after {comparison.reuse.ttft_s:.2f} s ({comparison.speedup:.1f}x sooner)", ratio=1
    )
    table.add_row(Text(comparison.full.text), Text(comparison.reuse.text))
    return table


def tokens_table(rows: list[tuple[str, Comparison]]) -> Table:
    """One labelled row a question: tokens of the reused prompt by what was done with them."""
    table = _table("Tokens", "prompt", *COUNTS)
    for label, comparison in rows:
        report = comparison.reuse.report
        table.add_row(Text(label), *(f"{report[f'{name}_tokens']:,}" for name in ("prompt", *COUNTS)))
    return table


def times_table(rows: list[tuple[str, Comparison]], median_speedup: float) -> Table:
    """One labelled row a question: time to first token of both runs, the parts of the reused one, speed-up."""
    table = _table("Time to first token, seconds", "full", "reuse", *TTFT_PARTS, "speed-up")
    for label, comparison in rows:
        parts = (f"{comparison.reuse.report[f'{name}_s']:.2f}" for name in TTFT_PARTS)
        both = f"{comparison.full.ttft_s:.2f}", f"{comparison.reuse.ttft_s:.2f}"
        table.add_row(Text(label), *both, *parts, f"{comparison.speedup:.1f}x")
    table.caption = Text(f"Median speed-up of the time to first token: {median_speedup:.1f}x", style="bold green")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("question", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table
