"""`speccache eval`: how close each policy comes to full recompute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, with_config
from speccache_rag.cli.output import console
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from speccache_rag.evaluation.report import Row
    from speccache_rag.evaluation.runner import Contestant


@with_config
def evaluate(
    options: Options,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help='JSON lines: {"id", "question", "answers": [..], "chunks": [{"title", "text"}]}.'
        ),
    ],
    n: Annotated[int, typer.Option("-n", min=1, help="Take the first N examples.")] = 20,
    also_speculative: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A further speculative model to compare. Repeatable."),
    ] = None,
    json: Json = None,
) -> None:
    """Compare every policy, or the one named by --policy, with full recompute: F1, KL divergence, top-1 agreement.

    KL and agreement are taken over the tokens of full recompute's own answer. Runs in the Transformers engine, and
    keeps chunk KV in RAM unless --store names a folder. With --json, results are written after each example, and a run
    that was interrupted goes on where it stopped.
    """
    from tqdm.auto import tqdm

    from speccache_rag.evaluation.datasets import read_examples
    from speccache_rag.evaluation.report import ResultFile, summarize
    from speccache_rag.evaluation.runner import Evaluation

    config = SpecCacheConfig.build(**{"engine": "transformers", **options})
    named = [model for model in (config.speculative_model, *(also_speculative or ())) if model]
    contestants = _contestants(options, config, named)
    examples = read_examples(data, n)
    settings = {"data": data.name, "config": config.model_dump(exclude={"store"}), "speculative_models": named}
    results = ResultFile(json, settings)
    waiting = [example for example in examples if example.id not in results.done]
    with (
        Evaluation(config, contestants) as evaluation,
        tqdm(total=len(waiting) * (len(contestants) + 1), desc="evaluate", unit="run") as bar,
    ):
        for example in waiting:
            results.add(evaluation.run(example, bar.update))
    wanted = {example.id for example in examples}
    console().print(_table(summarize([record for record in results.records if record.example in wanted])))


def _contestants(options: Options, config: SpecCacheConfig, speculative_models: list[str]) -> list[Contestant]:
    """Who takes part: every policy, or the one that was named."""
    from speccache_rag.evaluation.runner import all_contestants, one_policy

    if "policy" in options:
        return one_policy(config, speculative_models)
    if given := {"policy_options", "scoring"} & set(options):
        raise ConfigurationError(
            f"{' and '.join(sorted(given))} given, but no policy.", hint="Name it with --policy, or leave them out."
        )
    return all_contestants(speculative_models)


def _table(rows: list[Row]) -> Table:
    table = Table(title=f"{rows[0].n} examples; KL in nats from full recompute, along its answer")
    table.add_column("policy", overflow="fold")
    for name in ("F1", "KL mean", "KL median", "agreement", "effective ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.f1, row.kl_mean, row.kl_median, row.agreement, row.effective_ratio)
        table.add_row(row.contestant, *(f"{figure:.3f}" for figure in figures))
    return table
