"""`speccache explain`: what would be done with each token of a prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from rich.text import Text

from speccache_rag.cli.options import Json, Options, stored_config, with_config, write_json
from speccache_rag.cli.output import console, started
from speccache_rag.cli.prompts import Prompt, Raw, chat_or_raw
from speccache_rag.cli.texts import read_prompt

STYLES = {"loaded": "dim", "recomputed": "bold", "fresh": "", "missed": "red"}
"""How a token is printed, by what would be done with it."""


@with_config
def explain(options: Options, prompt: Prompt, raw: Raw = False, json: Json = None) -> None:
    """Show a prompt token by token: loaded dim, recomputed bold, fresh plain, missed red."""
    config, text = stored_config(options), read_prompt(prompt)
    with started(config) as sc:
        explanation = sc.explain(chat_or_raw(sc, text, raw))
    write_json(json, {"tokens": [asdict(t) for t in explanation], "report": explanation.report.to_dict()})
    counts = Counter(token.action for token in explanation)
    legend = [Text(f"{counts[action]:,} {action}", style=style) for action, style in STYLES.items()]
    console().print(Text.assemble(*((token.text, STYLES[token.action]) for token in explanation)))
    console().print(Text(", ").join(legend))
