"""Entry point of `speccache`: collects the subcommands and prints the package's own errors in one paragraph."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from speccache_rag.cli.ask import ask
from speccache_rag.cli.bench import bench
from speccache_rag.cli.demo.command import demo
from speccache_rag.cli.doctor import doctor
from speccache_rag.cli.evaluate import evaluate
from speccache_rag.cli.explain import explain
from speccache_rag.cli.inventory import check, forget, gc, inspect
from speccache_rag.cli.options import DEFAULT_STORE
from speccache_rag.cli.report import report
from speccache_rag.cli.spoken import as_flags
from speccache_rag.cli.tune import tune
from speccache_rag.cli.warm import warm
from speccache_rag.errors import SpecCacheError

FAILED = 2
"""Exit code after an error of this package."""

app = typer.Typer(
    name="speccache",
    help="Reuse the KV cache of retrieved chunks at any position of a RAG prompt. "
    f"Chunk KV is kept in {DEFAULT_STORE} unless --store names another folder.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, warm, ask, explain, inspect, forget, gc, check, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.command()(report)
app.command()(tune)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speccache-rag {version('speccache-rag')}")
        raise typer.Exit


@app.callback()
def _options(
    shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What stands in front of a command."""


def main() -> None:
    """Run the command line. Errors of this package end it with a message and code 2; any other shows its traceback."""
    try:
        app()
    except SpecCacheError as error:
        Console(stderr=True).print(Text(f"{type(error).__name__}: {as_flags(str(error))}", style="red"))
        sys.exit(FAILED)
