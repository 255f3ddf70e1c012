"""`speccache eval`: how close each policy comes to full recompute."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, with_config, write_json
from speccache_rag.cli.output import console, messages
from speccache_rag.cli.questions import Chroma, Collection, Retriever, TopK, retrieval
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speccache_rag.evaluation.contestants import Contestant
    from speccache_rag.evaluation.datasets import Example
    from speccache_rag.evaluation.records import RecordFile
    from speccache_rag.evaluation.results import Results


@with_config
def evaluate(
    options: Options,
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA...", help="Questions with their chunks, a file for each data set; or alone."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Results folder; a run goes on where it stopped.")] = Path(
        "results"
    ),
    n: Annotated[int, typer.Option("-n", min=1, help="Take the first N questions of each file.")] = 20,
    policies: Annotated[
        str | None,
        typer.Option(help="Comma-separated expressions, such as epic,heads(8)+attended(target)@0.1. Default: all."),
    ] = None,
    ratios: Annotated[str | None, typer.Option(help="Comma-separated recompute ratios. Default: the ratio.")] = None,
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The contestants of a figure: layers, spans, tau, scorers, deviation."),
    ] = None,
    also_speculative: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A further speculative model to compare. Repeatable."),
    ] = None,
    texts: Annotated[bool, typer.Option(help="Keep answers in the records.")] = True,
    chroma: Chroma = None,
    collection: Collection = None,
    retriever: Retriever = None,
    top_k: TopK = 5,
    json: Json = None,
) -> None:
    """Compare policies with full recompute, question by question: KL divergence, top-1 agreement, F1 and the like.

    KL and agreement are taken over the tokens of full recompute's own answer, so no right answer has to be known. Runs
    in the Transformers engine, and keeps chunk KV in RAM unless --store names a folder. Each record is written to
    DIR/runs.jsonl when it is made; `speccache report DIR` makes tables and figures of them.
    """
    from speccache_rag.evaluation.datasets import read_examples
    from speccache_rag.evaluation.records import RecordFile
    from speccache_rag.evaluation.results import Results

    config = SpecCacheConfig.build(**{"engine": "transformers", **options})
    retrieve = retrieval(chroma, collection, retriever, top_k)
    examples = [example for path in data for example in read_examples(path, n, retrieve)]
    file = RecordFile(out)
    if study == "deviation":
        _measure_deviation(config, examples, out)
        return
    named = [model for model in (config.speculative_model, *(also_speculative or ())) if model]
    found = _contestants(options, config, named, policies, ratios, study)
    run_all(config, found, examples, file, keep_texts=texts)
    wanted = {(example.dataset, example.id) for example in examples}
    name = Path(config.model).name
    results = Results(r for r in file.records if r.target == name and (r.dataset, r.example) in wanted)
    console().print(table(results))
    write_json(json, [asdict(row) for row in results.rows()])


def run_all(
    config: SpecCacheConfig,
    found: Sequence[Contestant],
    examples: Sequence[Example],
    file: RecordFile,
    *,
    keep_texts: bool,
) -> None:
    """Run what has no record yet, with a bar that tells the time left."""
    from tqdm.auto import tqdm

    from speccache_rag.evaluation.harness import Evaluation

    with Evaluation(config, found, keep_texts=keep_texts) as evaluation:
        waiting = [(example, evaluation.missing(example, file.done)) for example in examples]
        with tqdm(total=sum(len(wanted) for _, wanted in waiting), desc="evaluate", unit="run") as bar:
            for example, wanted in waiting:
                if wanted:
                    for record in evaluation.run(example, wanted, bar.update):
                        file.add(record)


def _contestants(
    options: Options,
    config: SpecCacheConfig,
    speculative_models: list[str],
    policies: str | None,
    ratios: str | None,
    study: str | None,
) -> list[Contestant]:
    """Who takes part: the policies that were named, those of a study, or all."""
    from speccache_rag.evaluation.contestants import contestants, expression_of, split_list
    from speccache_rag.evaluation.studies import everything, studied

    at = [config.recompute_ratio] if ratios is None else numbers(ratios)
    scorings: list[Any] = [config.scoring] if "scoring" in options else ["cached"]
    if policies is not None:
        written = split_list(policies)
    elif study is not None:
        written, scorings = studied(study), scorings
    elif "policy" in options:
        written = [expression_of(config.policy, config.policy_options)]
    elif given := {"policy_options"} & set(options):
        raise ConfigurationError(f"{', '.join(given)} given, but no policy.", hint="Name it with --policy.")
    else:
        written, scorings = everything(bool(speculative_models)), ["cached", "online"]
    return contestants(written, at, speculative_models, scorings)


def numbers(text: str) -> list[float]:
    """The ratios of `--ratios`.

    Raises:
        ConfigurationError: one is no number in [0, 1].
    """
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--ratios is {text!r}.", hint="Write --ratios 0.05,0.15,0.3.") from error
    if bad := [ratio for ratio in found if not 0 <= ratio <= 1]:
        raise ConfigurationError(f"--ratios has {bad[0]}, which is not in [0, 1].", hint="")
    return found


def _measure_deviation(config: SpecCacheConfig, examples: Sequence[Example], out: Path) -> None:
    from speccache_rag.evaluation.deviation_records import read, write
    from speccache_rag.evaluation.deviation_study import measure

    done = {(record.dataset, record.example, record.target) for record in read(out)}
    waiting = [e for e in examples if (e.dataset, e.id, Path(config.model).name) not in done]
    for number, records in enumerate(measure(config, waiting), start=1):
        write(out, records)
        messages().print(f"deviation: {number} of {len(waiting)} questions")


def table(results: Results) -> Table:
    """What was found in short, one line a contestant, cheapest first."""
    shown = Table(title="KL in nats from full recompute, along its answer; computed: share of the prompt's tokens")
    shown.add_column("contestant", overflow="fold")
    rows = sorted(results.rows(), key=lambda row: row.computed)
    measures = sorted({name for row in rows for name in row.measures})
    for name in ("n", "computed", "KL mean", "median", "agreement", *measures):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = (row.computed, row.kl_mean, row.kl_median, row.agreement, *(row.measures.get(m) for m in measures))
        shown.add_row(row.label, str(row.n), *("" if figure is None else f"{figure:.3f}" for figure in figures))
    return shown
