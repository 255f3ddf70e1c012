"""`speccache bench load`: many requests at once, policy beside policy in one process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, with_config, write_json
from speccache_rag.cli.output import console, messages

if TYPE_CHECKING:
    from speccache_rag.evaluation.load import LoadResult


@with_config
def load(
    options: Options,
    policies: Annotated[
        str, typer.Option(help="Comma-separated; a ratio may follow after @, as in epic@0.1.")
    ] = "full_recompute,speccache@0.15,full_reuse",
    rates: Annotated[str, typer.Option(help="Requests a second, comma-separated; 0 sends all at once.")] = "0",
    requests: Annotated[int, typer.Option(min=1, help="Requests in each run.")] = 16,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in each prompt.")] = 6,
    words: Annotated[int, typer.Option(min=1, help="Words in each chunk.")] = 280,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    json: Json = None,
) -> None:
    """Time to first token, gaps between tokens and throughput under load, from an empty prefix cache each time."""
    from speccache_rag.evaluation.load import made_up_chunks, made_up_prompts, run_load
    from speccache_rag.runtime import SpecCache

    texts = made_up_chunks(4 * chunks, words)
    prompts = made_up_prompts(texts, requests, chunks)
    with SpecCache(**options) as sc:
        sc.warm(texts)
        contestants = [_parsed(name) for name in policies.split(",")]
        for policy, ratio in contestants:  # no timed run pays for first use
            sc.generate(prompts[0], policy=policy, recompute_ratio=ratio, max_tokens=2)
        results = []
        for rate in (float(rate) for rate in rates.split(",")):
            for policy, ratio in contestants:
                sc.reset_prefix_cache()
                run = run_load(sc, prompts, policy=policy, recompute_ratio=ratio, rate_rps=rate, max_tokens=max_tokens)
                results.append(asyncio.run(run))
                messages().print(f"{policy} at rate {rate:g}: {results[-1].seconds:.1f} s")
    console().print(_table(results))
    write_json(json, [result.to_dict() for result in results])


def _parsed(contestant: str) -> tuple[str, float | None]:
    """Name and ratio of `name@ratio`."""
    name, _, ratio = contestant.strip().partition("@")
    return name, float(ratio) if ratio else None


def _table(results: list[LoadResult]) -> Table:
    """One row for each policy and rate; ratios are to the first policy at the same rate."""
    table = Table(title="Under load (seconds; in brackets: ratio to the first policy at this rate)")
    for column in ("rate", "policy", "requests/s", "TTFT p50", "TTFT p95", "gap p50", "gap p99", "longest gap"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    first: dict[float, LoadResult] = {}
    for result in results:
        base = first.setdefault(result.rate_rps, result)

        def cell(name: str, result: LoadResult = result, base: LoadResult = base) -> str:
            value, reference = getattr(result, name), getattr(base, name)
            return f"{value:.3g} ({value / reference:.2f})" if reference else f"{value:.3g}"

        names = ("throughput_rps", "ttft_p50_s", "ttft_p95_s", "gap_p50_s", "gap_p99_s", "gap_max_s")
        rate = f"{result.rate_rps:g}" if result.rate_rps else "all at once"
        table.add_row(rate, result.policy, *[cell(name) for name in names])
    return table
