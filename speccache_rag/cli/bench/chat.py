"""`speccache bench chat`: the turns of a conversation, policy beside policy in one process."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from speccache_rag.cli.options import Json, Options, with_config, write_json
from speccache_rag.cli.output import console

if TYPE_CHECKING:
    from speccache_rag.evaluation.chat import Turn


@with_config
def chat(
    options: Options,
    policies: Annotated[str, typer.Option(help="Comma-separated; the first is the one to compare with.")] = (
        "full_recompute,epic"
    ),
    turns: Annotated[int, typer.Option(min=2, help="Questions in a conversation.")] = 6,
    words: Annotated[int, typer.Option(min=1, help="Words in each quoted chunk.")] = 280,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Conversations of each kind; times are their medians.")] = 3,
    json: Json = None,
) -> None:
    """Time to first token and cached tokens, turn by turn, with chunks quoted in the conversation and without."""
    from speccache_rag.evaluation.chat import run_chat
    from speccache_rag.evaluation.load import made_up_chunks
    from speccache_rag.runtime import SpecCache

    chunks = made_up_chunks(turns, words)
    done: list[Turn] = []
    with SpecCache(**options) as sc:
        sc.warm(chunks)
        for _ in range(rounds + 1):  # the first one is a rehearsal
            for quoted in (False, True):
                for policy in policies.split(","):
                    done += run_chat(sc, chunks, policy=policy, turns=turns, quoted=quoted, max_tokens=max_tokens)
    per_round = 2 * len(policies.split(",")) * turns
    timed = done[per_round:]
    for quoted in (False, True):
        console().print(_table([turn for turn in timed if turn.quoted == quoted], policies.split(","), quoted))
    write_json(json, [turn.to_dict() for turn in timed])


def _table(timed: list[Turn], policies: list[str], quoted: bool) -> Table:
    table = Table(title=f"A conversation {'that quotes chunks' if quoted else 'without chunks'}")
    table.add_column("turn", justify="right")
    for policy in policies:
        table.add_column(f"{policy}: prompt / cached / loaded tokens", justify="right")
        table.add_column("TTFT s (ratio)", justify="right")
    for number in sorted({turn.turn for turn in timed}):
        row, base = [str(number)], 0.0
        for policy in policies:
            same = [turn for turn in timed if (turn.turn, turn.policy) == (number, policy)]
            ttft_s = median(turn.ttft_s for turn in same)
            base = base or ttft_s
            last = same[-1]
            row.append(f"{last.prompt_tokens:,} / {last.cached_tokens:,} / {last.loaded_tokens:,}")
            row.append(f"{ttft_s:.3f} ({ttft_s / base:.2f})")
        table.add_row(*row)
    return table
