"""`speccache bench store`: how fast chunk KV comes from each tier, and what many known chunks cost."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, write_json
from speccache_rag.cli.output import console, messages


def store(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to measure, an empty folder of the disk in question; else a temporary one."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Chunk tokens of a prompt.")] = 4096,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks they are in.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model. The default model: Qwen2.5-1.5B.")] = 28,
    heads: Annotated[int, typer.Option(min=1, help="KV heads of the model.")] = 2,
    head_dim: Annotated[int, typer.Option(min=2, help="Head dim of the model.")] = 128,
    known: Annotated[int, typer.Option(min=0, help="Chunks of a catalogue; 0 leaves it out.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="The median of so many is shown.")] = 5,
    full_ttft: Annotated[
        float | None, typer.Option(help="Seconds a full prefill of the same tokens takes, to show shares of it.")
    ] = None,
    json: Json = None,
) -> None:
    """Load and move the KV of one prompt from each tier; open and search a large catalogue. Needs no model."""
    from speccache_rag.evaluation.store import KVShape, measure_catalogue, measure_tiers

    with tempfile.TemporaryDirectory(dir=folder) as name:
        with messages().status("Reading KV ..."):
            tiers = measure_tiers(Path(name) / "store", KVShape(layers, heads, head_dim), tokens, chunks, rounds)
        with messages().status(f"Making a catalogue of {known:,} chunks ..."):
            catalogue = measure_catalogue(Path(name), known) if known else None
    table = Table(title=f"{tokens:,} tokens, {tiers[0].bytes / 1e6:,.0f} MB")
    for column in ("from", "load, s", "GB/s", "of memory copy", "move, s", "of full prefill"):
        table.add_column(column, justify="left" if column == "from" else "right")
    for tier in tiers:
        share = "" if full_ttft is None else f"{(tier.load_s + tier.move_s) / full_ttft:.3f}"
        speed = tier.gb_per_s / tiers[0].gb_per_s
        table.add_row(
            tier.tier, f"{tier.load_s:.4f}", f"{tier.gb_per_s:.2f}", f"{speed:.2f}", f"{tier.move_s:.4f}", share
        )
    console().print(table)
    if catalogue is not None:
        console().print(
            f"A catalogue of {catalogue.n_chunks:,} chunks: opened in {catalogue.start_s:.2f} s, "
            f"{catalogue.rss_bytes_per_chunk:,.0f} bytes of RAM a chunk, searched in {catalogue.find_s * 1e3:.1f} ms."
        )
    write_json(json, {"tiers": [t.to_dict() for t in tiers], "catalogue": catalogue and asdict(catalogue)})
