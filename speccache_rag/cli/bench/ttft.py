"""`speccache bench ttft`: time to first token on an idle engine, policy beside policy in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, with_config, write_json
from speccache_rag.cli.output import console, messages

if TYPE_CHECKING:
    from speccache_rag.evaluation.ttft import TtftRow
    from speccache_rag.runtime import SpecCache

POLICIES = "full_reuse,epic@0.05,epic@0.15,epic@0.3,attended(target)@0.15"


@with_config
def ttft(
    options: Options,
    policies: Annotated[str, typer.Option(help="Comma-separated expressions; a ratio follows after @.")] = POLICIES,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of each prompt, about.")] = 4000,
    chunks: Annotated[int, typer.Option(min=2, help="Chunks in each prompt.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each policy on each prompt.")] = 2,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Random weights in this shape on the Transformers engine; no --model then."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has.")] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of random weights: bfloat16, float16, float32.")
    ] = "bfloat16",
    json: Json = None,
) -> None:
    """Median time to first token, its ratio to full recompute, and how much of the possible speedup that is.

    Chunk KV comes from RAM unless --store names a folder. Policies take turns on each prompt, each from an empty prefix
    cache; the engine's own prefix cache is measured beside them, on repeated and on shuffled chunks. `--json
    DIR/ttft.json` lets `speccache report DIR` compare policies in equal time. With --shape only torch and transformers
    are needed, and no model.
    """
    with tempfile.TemporaryDirectory() as folder:
        if shape is not None:
            import torch

            from speccache_rag.evaluation.random_model import write_random_model

            messages().print(f"Making a random model in the shape of {shape} ...")
            write_random_model(Path(folder), shape, dtype=getattr(torch, dtype), n_layers=layers)
            options = {**options, "model": folder, "engine": "transformers"}
        rows = _measured(options, policies, tokens, chunks, prompts, rounds)
        name = shape or Path(str(options["model"])).name
    console().print(_table(name, rows))
    from speccache_rag.evaluation.ttft import to_json

    write_json(json, to_json(rows, {"model": name, "engine": options.get("engine", "vllm"), "prompt_tokens": tokens}))


def _measured(options: Options, policies: str, tokens: int, chunks: int, prompts: int, rounds: int) -> list[TtftRow]:
    from tqdm.auto import tqdm

    from speccache_rag.config import SpecCacheConfig
    from speccache_rag.evaluation.contestants import contestants, split_list
    from speccache_rag.evaluation.ttft import Stopwatch, shuffled
    from speccache_rag.runtime import SpecCache

    config = SpecCacheConfig.build(**options)
    models = [config.speculative_model] if config.speculative_model else []
    found = contestants(split_list(policies), [config.recompute_ratio], models, [config.scoring])
    asking = [one.policy for one in found if one.built.needs_speculative_kv]
    if asking and "policy" not in options:
        config = config.model_copy(update={"policy": asking[0]})  # so that `warm` prepares for it
    with SpecCache.from_config(config) as sc:
        sets = made_up_sets(sc, tokens, chunks, prompts)
        sc.warm([text for texts in sets for text in texts])
        asked = [chat_of(texts) for texts in sets]
        watch = Stopwatch(sc, found)
        orders = list(shuffled(sets[: max(1, prompts)])) if config.engine == "vllm" else []
        total = rounds * len(asked) * len(watch.labels) + len(orders)
        watch.rehearse(asked[0])
        with tqdm(total=total, desc="measure", unit="prompt") as bar:
            for _ in range(rounds):
                watch.round(asked, bar.update)
            if orders:
                watch.prefix_cache([chat_of(texts) for _, texts in orders], [order for order, _ in orders], bar.update)
        return watch.rows()


def made_up_sets(sc: SpecCache, tokens: int, chunks: int, prompts: int) -> list[list[str]]:
    """Texts of made-up words for each prompt, in chunks of as many tokens as add up to about `tokens`."""
    from speccache_rag.evaluation.load import made_up_chunks

    per_chunk = max(8, tokens // chunks)
    sample = made_up_chunks(1, 200)[0]
    words = max(1, round(per_chunk * 200 / len(sc.tokenizer(sample)["input_ids"])))
    texts = made_up_chunks(chunks * prompts, words)
    return [texts[start : start + chunks] for start in range(0, len(texts), chunks)]


def chat_of(texts: Sequence[str]) -> list[dict[str, str]]:
    """A prompt of the chunks and little else."""
    joined = "\n\n".join(texts)
    return [{"role": "user", "content": f"{joined}\n\nWhich of them names a river?"}]


def _table(name: str, rows: Sequence[TtftRow]) -> Table:
    shown = Table(title=f"Time to first token, {name}, prompts of {rows[0].prompt_tokens:.0f} tokens")
    shown.add_column("policy", overflow="fold")
    for column in ("computed", "median s", "quartiles", "scoring s", "speedup", "of its limit"):
        shown.add_column(column, justify="right")
    for row in rows:
        quartiles = f"{row.ttft_low_s:.3f} to {row.ttft_high_s:.3f}"
        figures = (f"{row.computed_tokens:.0f}", f"{row.ttft_median_s:.3f}", quartiles, f"{row.score_median_s:.3f}")
        shown.add_row(row.label, *figures, f"{row.speedup:.1f}x", f"{row.of_limit:.2f}")
    return shown
