"""A chat run: turn after turn of one conversation, and what each turn finds of the turns before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from speccache_rag.runtime import SpecCache


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    policy: str
    turn: int
    """From 1."""
    quoted: bool
    """Whether chunks stand in the conversation."""
    prompt_tokens: int
    cached_tokens: int
    """Found in the engine's own prefix cache."""
    loaded_tokens: int
    ttft_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_chat(
    sc: SpecCache, chunks: Sequence[str], *, policy: str, turns: int, quoted: bool, max_tokens: int
) -> list[Turn]:
    """Hold a conversation from an empty prefix cache; with `quoted`, each question quotes the next chunk."""
    sc.reset_prefix_cache()
    messages: list[dict[str, str]] = []
    done = []
    for turn in range(1, turns + 1):
        context = f"{chunks[(turn - 1) % len(chunks)]}\n\n" if quoted else ""
        messages.append({"role": "user", "content": f"{context}Question {turn}: what do you make of it so far?"})
        answer = sc.generate(messages, policy=policy, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        messages.append({"role": "assistant", "content": answer.text})
        report = answer.report
        counts = (report.prompt_tokens, report.cached_tokens, report.loaded_tokens)
        done.append(Turn(policy, turn, quoted, *counts, report.ttft_s))
    return done
