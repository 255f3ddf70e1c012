"""`speccache tune`: the cheapest policy and ratio for one's own questions, as a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from speccache_rag.cli.evaluate import numbers, run_all
from speccache_rag.cli.options import Options, with_config
from speccache_rag.cli.output import console, messages
from speccache_rag.cli.questions import Chroma, Collection, Retriever, TopK, retrieval
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speccache_rag.evaluation.tuning import Candidate

BOUNDS = {"agreement": 0.95, "kl": 0.1, "f1": 0.02}
"""What a goal must reach where nothing else is said."""

POLICIES = ("full_reuse", "epic", "attended(target)")


@with_config
def tune(
    options: Options,
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA...", help="Questions, with their chunks or alone, as `eval` takes them."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Results folder; a run goes on where it stopped.")] = Path(
        "results"
    ),
    write: Annotated[Path, typer.Option(metavar="FILE", help="The configuration file.")] = Path("speccache.toml"),
    n: Annotated[int, typer.Option("-n", min=4, help="Take the first N questions of each file.")] = 20,
    goal: Annotated[
        str, typer.Option(metavar="agreement|kl|f1", help="What must stay within the bound.")
    ] = "agreement",
    bound: Annotated[
        float | None, typer.Option(help="Least agreement (0.95), most KL in nats (0.1), or most F1 lost (0.02).")
    ] = None,
    policies: Annotated[str, typer.Option(help="Comma-separated expressions to try.")] = ",".join(POLICIES),
    ratios: Annotated[str, typer.Option(help="Comma-separated recompute ratios to try.")] = "0.05,0.15,0.3",
    chroma: Chroma = None,
    collection: Collection = None,
    retriever: Retriever = None,
    top_k: TopK = 5,
) -> None:
    """Find the cheapest policy and ratio whose answers stay within a bound of full recompute's, on these questions.

    Within means: the 95 % interval of the mean is. Few questions have wide intervals; then nothing fits but full
    recompute, and the table shows what comes near. The other options given are written into the file as they are.
    """
    from speccache_rag.evaluation.contestants import contestants, split_list
    from speccache_rag.evaluation.datasets import read_examples
    from speccache_rag.evaluation.records import RecordFile
    from speccache_rag.evaluation.results import Results
    from speccache_rag.evaluation.tuning import candidates, cheapest

    if goal not in BOUNDS:
        raise ConfigurationError(f"goal is {goal!r}; it must be one of {', '.join(BOUNDS)}.", hint="")
    limit = BOUNDS[goal] if bound is None else bound
    config = SpecCacheConfig.build(**{**options, "engine": "transformers"})
    retrieve = retrieval(chroma, collection, retriever, top_k)
    examples = [example for path in data for example in read_examples(path, n, retrieve)]
    models = [config.speculative_model] if config.speculative_model else []
    found = contestants(split_list(policies), numbers(ratios), models, [config.scoring])
    file = RecordFile(out)
    run_all(config, found, examples, file, keep_texts=True)
    wanted, name = {(e.dataset, e.id) for e in examples}, Path(config.model).name
    results = Results(r for r in file.records if r.target == name and (r.dataset, r.example) in wanted)
    tried: Any = candidates(results, goal, limit)  # type: ignore[arg-type]
    console().print(_table(tried, goal, limit))
    best = cheapest(tried)
    if best is None:
        raise ConfigurationError(f"Nothing keeps {goal} within {limit:g} here.", hint="Take more questions with -n.")
    write.write_text(_tuned(options, best, goal, limit), encoding="utf-8")
    messages().print(f"wrote {write}: {best.label}")


def _tuned(options: Options, best: Candidate, goal: str, bound: float) -> str:
    """The configuration file: what was given, with the best policy and ratio."""
    record = best.record
    chosen = {"policy": record.policy, "policy_options": {}, "recompute_ratio": record.recompute_ratio}
    if record.speculative_model is None:
        chosen["speculative_model"] = None
    config = SpecCacheConfig.build(**{**options, **chosen})
    return (
        f"# Chosen by `speccache tune` on {best.n} questions: {goal} {best.value:.3f},\n"
        f"# 95 % interval {best.low:.3f} to {best.high:.3f}, bound {bound:g};\n"
        f"# {best.cost:.0%} of the prompt's tokens are computed.\n"
        f"{config.to_toml()}"
    )


def _table(tried: Sequence[Candidate], goal: str, bound: float) -> Table:
    shown = Table(title=f"{goal} against full recompute; bound {bound:g}")
    shown.add_column("contestant", overflow="fold")
    for name in ("computed", goal, "95 % interval", "fits"):
        shown.add_column(name, justify="right")
    for one in tried:
        interval = f"{one.low:.3f} to {one.high:.3f}"
        shown.add_row(one.label, f"{one.cost:.2f}", f"{one.value:.3f}", interval, "yes" if one.fits else "")
    return shown
