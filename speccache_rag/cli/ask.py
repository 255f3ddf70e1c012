"""`speccache ask`: answer one prompt, and say what was reused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from speccache_rag.cli.options import Json, Options, stored_config, with_config, write_json
from speccache_rag.cli.output import messages, report_table, started
from speccache_rag.cli.prompts import Prompt, Raw, chat_or_raw
from speccache_rag.cli.texts import read_prompt

if TYPE_CHECKING:
    from speccache_rag.types import Completion


@with_config
def ask(
    options: Options,
    prompt: Prompt,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in the answer; else what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    raw: Raw = False,
    json: Json = None,
) -> None:
    """Answer a prompt, reusing the KV of every warmed chunk found in it."""
    config, text = stored_config(options), read_prompt(prompt)
    done: Completion | None = None
    with started(config) as sc:
        for delta in sc.stream(chat_or_raw(sc, text, raw), max_tokens=max_tokens, temperature=temperature):
            typer.echo(delta.text, nl=False)
            done = delta.completion or done
    typer.echo()
    if done is None:
        raise RuntimeError("the stream ended without a completion")
    messages().print(report_table(done.report))
    write_json(
        json,
        {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "usage": done.usage.to_dict(),
            "report": done.report.to_dict(),
        },
    )
