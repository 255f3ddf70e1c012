"""What several commands print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from speccache_rag.config import SpecCacheConfig
    from speccache_rag.runtime import SpecCache
    from speccache_rag.types import PrefillReport

TOKEN_COUNTS = ("prompt", "matched", "cached", "loaded", "recomputed", "fresh", "missed")
"""The `*_tokens` fields of a report."""

TTFT_PARTS = ("score", "align", "load", "recompute", "prefill")
"""The `*_s` fields of a report, in the order things happen."""


def console() -> Console:
    """Standard output, for results."""
    return Console(highlight=False)


def messages() -> Console:
    """Standard error, for progress and remarks; results alone go to standard output."""
    return Console(stderr=True, highlight=False)


@contextmanager
def started(config: SpecCacheConfig) -> Iterator[SpecCache]:
    """A `SpecCache` whose engine runs; closed at the end. Starting takes from seconds to minutes, and says so."""
    from speccache_rag.runtime import SpecCache

    with SpecCache.from_config(config) as sc:
        with messages().status(f"Starting {config.model} ..."):
            sc.start()
        yield sc


def report_table(report: PrefillReport) -> Table:
    """Tokens by what was done with them, and the parts of the time to first token."""
    table = Table(title=f"policy {report.policy}, effective recompute ratio {report.effective_ratio:.2f}")
    table.add_column("tokens")
    table.add_column("", justify="right")
    table.add_column("time to first token")
    table.add_column("seconds", justify="right")
    counts = [(name, f"{getattr(report, f'{name}_tokens'):,}") for name in TOKEN_COUNTS]
    times = [(name, f"{getattr(report, f'{name}_s'):.3f}") for name in TTFT_PARTS]
    times += [("all", f"{report.ttft_s:.3f}"), ("loading hidden", f"{report.load_hidden_s:.3f}")]
    for count, part in zip_longest(counts, times, fillvalue=("", "")):
        table.add_row(*count, *part)
    return table
