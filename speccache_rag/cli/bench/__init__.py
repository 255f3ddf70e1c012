"""`speccache bench`: measurements, each a command of its own."""

from __future__ import annotations

import typer

from speccache_rag.cli.bench.chat import chat
from speccache_rag.cli.bench.load import load
from speccache_rag.cli.bench.store import store
from speccache_rag.cli.bench.ttft import ttft

bench = typer.Typer(help="Measure speed on this machine. Ratios within one run mean more than seconds.")
bench.command()(chat)
bench.command()(load)
bench.command()(ttft)
bench.command()(store)
