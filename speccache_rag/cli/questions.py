"""Options of `eval` and `tune` that say where the chunks of a question come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speccache_rag.errors import ConfigurationError

if TYPE_CHECKING:
    from speccache_rag.evaluation.datasets import Retrieve

Chroma = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Retrieve chunks from this Chroma folder, by its own embedding function."),
]
Collection = Annotated[str | None, typer.Option(metavar="NAME", help="The collection in it, where there are several.")]
Retriever = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Retrieve with this object: a LlamaIndex index, a retriever, or a function from a question to texts.",
    ),
]
TopK = Annotated[int, typer.Option(min=1, help="Chunks retrieved for each question.")]


def retrieval(chroma: Path | None, collection: str | None, retriever: str | None, top_k: int) -> Retrieve | None:
    """What the four options name: a function from a question to texts; None where they name nothing.

    Raises:
        ConfigurationError: two retrievers are named, or the one is none.
    """
    from speccache_rag.evaluation.retrieval import from_chroma, from_code

    if chroma is not None and retriever is not None:
        raise ConfigurationError("--chroma and --retriever are both given.", hint="Chunks come from one of them.")
    if chroma is not None:
        return from_chroma(chroma, collection, top_k)
    return None if retriever is None else from_code(retriever, top_k)
