"""`speccache warm`: compute and store the KV of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speccache_rag.cli.options import Json, Options, stored_config, with_config, write_json
from speccache_rag.cli.output import console, started
from speccache_rag.cli.texts import read_documents, split_text
from speccache_rag.errors import PromptError


@with_config
def warm(
    options: Options,
    paths: Annotated[list[Path], typer.Argument(help="Text files, folders of .md and .txt files, or - for stdin.")],
    chunk_tokens: Annotated[
        int,
        typer.Option(min=0, help="Most tokens in a chunk; texts are cut at paragraphs. 0 keeps each file one chunk."),
    ] = 256,
    json: Json = None,
) -> None:
    """Compute and store the KV of texts, so that prompts holding them need not.

    Chunks must be the ones your prompts will hold, letter by letter. What the store holds already is skipped, so an
    interrupted run continues where it stopped.
    """
    config = stored_config(options)
    documents = [text for text in read_documents(paths) if text.strip()]
    if not documents:
        raise PromptError("There is no text to warm.", hint="Give text files, or folders that hold .md or .txt files.")
    with started(config) as sc:

        def count(text: str) -> int:
            return len(sc.tokenizer.encode(text, add_special_tokens=False))

        chunks = [c for text in documents for c in (split_text(text, chunk_tokens, count) if chunk_tokens else [text])]
        report = sc.warm(chunks)
    console().print(
        f"{report.n_texts:,} chunks: {report.n_captured:,} captured ({report.captured_tokens:,} tokens, "
        f"{report.captured_bytes / 2**20:,.1f} MiB, {report.seconds:.1f} s), {report.n_skipped:,} already stored."
    )
    write_json(json, report.to_dict())
