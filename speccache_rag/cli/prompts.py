"""The prompt argument that `ask` and `explain` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from speccache_rag.runtime import SpecCache

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads stdin, @FILE a file.")]

Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the model's chat template.")]


def chat_or_raw(sc: SpecCache, text: str, raw: bool) -> str | list[dict[str, str]]:
    """One user turn; the text itself where that was asked for or the model has no chat template."""
    if raw or not sc.tokenizer.chat_template:
        return text
    return [{"role": "user", "content": text}]
