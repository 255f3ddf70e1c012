"""`speccache doctor`: check this machine and configuration."""

from __future__ import annotations

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, stored_config, with_config, write_json
from speccache_rag.cli.output import console, messages


@with_config
def doctor(options: Options, json: Json = None) -> None:
    """Check versions, models, store and engine; ends with code 1 where something is wrong."""
    from speccache_rag.runtime import SpecCache

    config = stored_config(options)
    with SpecCache.from_config(config) as sc, messages().status("Checking ..."):
        checks = sc.doctor()
    table = Table("", "check", "detail")
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[red]wrong[/]", check.name, check.detail)
    write_json(json, [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks])
    console().print(table)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
