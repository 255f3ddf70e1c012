"""`speccache inspect`, `gc`, `forget` and `check`: what a store folder holds, and how it is tidied."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from speccache_rag.cli.options import DEFAULT_STORE, Json, write_json
from speccache_rag.cli.output import console, messages
from speccache_rag.cli.texts import read_documents
from speccache_rag.errors import ConfigurationError, StoreUnavailable

if TYPE_CHECKING:
    from speccache_rag.chunks.inventory import Holding, Inventory, Rule

# What opens a store is imported by the commands themselves: it loads torch, and `speccache --help` should not wait.

_DAY_S = 86_400.0

Store = Annotated[str, typer.Option("--store", metavar="FOLDER", help="The store folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and leave it there.")]


def inspect(store: Store = DEFAULT_STORE, chunks: bool = False, json: Json = None) -> None:
    """Show what a store holds, by model and tenant: chunks, bytes, hits, age. --chunks lists every one."""
    now = time.time()
    with closing(_opened(store)) as inventory, messages().status(f"Reading {store} ..."):
        holdings = list(inventory.holdings())
    groups: defaultdict[tuple[str, str], list[Holding]] = defaultdict(list)
    for holding in holdings:
        groups[holding.about("model"), holding.about("tenant")].append(holding)
    rows = [{"model": m, "tenant": t, **_totals(group, now)} for (m, t), group in sorted(groups.items())]
    table = Table(title=store)
    for column in ("model", "tenant"):
        table.add_column(column)
    for column in ("known", "stored", "pinned", "GB", "hits", "idle, days"):
        table.add_column(column, justify="right")
    for row in rows:
        idle = "" if row["idle_days"] is None else f"{row['idle_days']:.1f}"
        counts = (f"{row[name]:,}" for name in ("known", "stored", "pinned"))
        table.add_row(
            row["model"] or "?", row["tenant"], *counts, f"{row['bytes'] / 1e9:.2f}", f"{row['hits']:,}", idle
        )
    console().print(table)
    described = [_described(holding, now) for holding in holdings] if chunks or json else []
    if chunks:
        for one in described:
            console().print(f"{one['key'][:12]} {one['bytes']:>12,} B  {one['hits']:>6} hits  {one['text'][:60]!r}")
    write_json(json, {"store": store, "groups": rows, "chunks": described})


def gc(
    store: Store = DEFAULT_STORE,
    keep: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Give up chunks that are not in these files or folders, a chunk a file."),
    ] = None,
    only_model: Annotated[str | None, typer.Option(metavar="MODEL", help="Give up chunks of other models.")] = None,
    older_than: Annotated[float | None, typer.Option(metavar="DAYS", help="Give up KV not used for so long.")] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned chunks too.")] = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Give up chunks, text and KV, by any of the rules given."""
    from speccache_rag.chunks.inventory import idle_for, not_among, of_other_models, to_give_up

    rules: list[Rule] = []
    if keep:
        rules.append(not_among(read_documents(keep)))
    if only_model is not None:
        rules.append(of_other_models(only_model))
    if older_than is not None:
        rules.append(idle_for(older_than))
    if not rules:
        raise ConfigurationError("gc was given no rule.", hint="Give --keep, --only-model or --older-than.")
    with closing(_opened(store)) as inventory:
        gone = to_give_up(inventory.holdings(), rules, pinned=pinned)
        if not dry_run:
            inventory.forget(holding.key for holding in gone)
    _say_gone(gone, dry_run, json)


def forget(
    names: Annotated[list[str], typer.Argument(help="Keys of chunks, or their whole texts; @FILE reads a text.")],
    store: Store = DEFAULT_STORE,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Forget chunks: leave neither their text nor their KV in the store folder."""
    given = [text for name in names for text in (read_documents([Path(name[1:])]) if name[:1] == "@" else [name])]
    with closing(_opened(store)) as inventory:
        keys = set(inventory.keys_of(given))
        gone = [holding for holding in inventory.holdings() if holding.key in keys]
        if not dry_run:
            inventory.forget(keys)
    _say_gone(gone, dry_run, json)


def check(
    store: Store = DEFAULT_STORE,
    fix: Annotated[bool, typer.Option("--fix", help="Remove what is damaged or left over.")] = False,
    json: Json = None,
) -> None:
    """Read and verify every stored chunk. Ends with code 1 where something is wrong and is not fixed."""
    from speccache_rag.store.disk import DiskStore

    _existing(store)
    with DiskStore(store) as disk, messages().status(f"Verifying {store} ..."):
        problems = disk.check(fix)
        stats = disk.stats()
    for problem in problems:
        console().print(problem)
    said = f"{len(problems)} problems{', fixed' if fix and problems else ''}"
    console().print(f"{stats.chunks:,} chunks, {stats.bytes / 1e9:.2f} GB: {said}.")
    write_json(json, {"problems": problems, "fixed": fix, **asdict(stats)})
    if problems and not fix:
        raise typer.Exit(1)


def _opened(store: str) -> Inventory:
    from speccache_rag.chunks.inventory import open_inventory

    return open_inventory(_existing(store))


def _existing(store: str) -> str:
    # A mistyped name must not make a folder.
    if not os.path.isdir(os.path.expanduser(store)):
        raise StoreUnavailable(f"There is no store at {store}.", hint="Name the folder with --store.")
    return store


def _totals(holdings: Iterable[Holding], now: float) -> dict[str, Any]:
    group = list(holdings)
    files = [holding.file for holding in group if holding.file]
    return {
        "known": sum(holding.known is not None for holding in group),
        "stored": len(files),
        "pinned": sum(holding.pinned for holding in group),
        "bytes": sum(file.bytes for file in files),
        "hits": sum(file.uses for file in files),
        "idle_days": min((now - file.used_at) / _DAY_S for file in files) if files else None,
    }


def _described(holding: Holding, now: float) -> dict[str, Any]:
    return {
        "key": holding.key,
        "model": holding.about("model"),
        "tenant": holding.about("tenant"),
        "text": holding.known.text if holding.known else "",
        "tokens": holding.known.n_tokens if holding.known else None,
        "bytes": holding.bytes,
        "hits": holding.file.uses if holding.file else 0,
        "pinned": holding.pinned,
        "idle_days": holding.idle_s(now) / _DAY_S if holding.file else None,
    }


def _say_gone(gone: list[Holding], dry_run: bool, json: Path | None) -> None:
    size = sum(holding.bytes for holding in gone)
    console().print(f"{len(gone):,} chunks, {size / 1e9:.2f} GB {'would be given up' if dry_run else 'given up'}.")
    write_json(json, {"chunks": [holding.key for holding in gone], "bytes": size, "dry_run": dry_run})
