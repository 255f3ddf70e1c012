"""Several answers at a time: `n` of each prompt, and all prompts of a batch. The engine batches them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from speccache_rag.chunks.warming import all_or_stop
from speccache_rag.errors import ConfigurationError
from speccache_rag.runtime import SpecCache
from speccache_rag.types import Completion

MOST_THREADS = 32
"""Threads of one batch. They only wait."""

Prompt = str | Sequence[Mapping[str, Any]]


def complete(runtime: SpecCache, prompts: Sequence[Prompt], params: Mapping[str, Any]) -> list[list[Completion]]:
    """For each prompt its answers.

    Raises:
        ConfigurationError: `params["n"]` is no number of answers.
    """
    calls = _calls(prompts, params)
    if len(calls) == 1:
        [(prompt, one)] = calls
        return [[runtime.generate(prompt, **one)]]
    with ThreadPoolExecutor(min(MOST_THREADS, max(1, len(calls)))) as pool:
        return _by_prompt(list(pool.map(lambda call: runtime.generate(call[0], **call[1]), calls)), len(prompts))


async def acomplete(runtime: SpecCache, prompts: Sequence[Prompt], params: Mapping[str, Any]) -> list[list[Completion]]:
    """`complete` for an event loop."""
    calls = _calls(prompts, params)
    tasks = [asyncio.create_task(runtime.agenerate(prompt, **one)) for prompt, one in calls]
    return _by_prompt(await all_or_stop(tasks), len(prompts))


def one_answer(params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that gives one answer.

    Raises:
        ConfigurationError: it asks for several.
    """
    if (n := params.get("n", 1)) != 1:
        raise ConfigurationError(f"n is {n!r}; a stream is one answer.", hint="Stream n times, or invoke.")
    return {name: value for name, value in params.items() if name != "n"}


def _calls(prompts: Sequence[Prompt], params: Mapping[str, Any]) -> list[tuple[Prompt, dict[str, Any]]]:
    """Prompt and arguments of each answer. A seed goes up by one from an answer of a prompt to the next, as in vLLM."""
    n, seed = params.get("n", 1), params.get("seed")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigurationError(f"n is {n!r}.", hint="Ask for one answer or more.")
    one = {name: value for name, value in params.items() if name != "n"}
    seeds: list[dict[str, Any]] = [{} if seed is None or index == 0 else {"seed": seed + index} for index in range(n)]
    return [(prompt, {**one, **seeded}) for prompt in prompts for seeded in seeds]


def _by_prompt(completions: Sequence[Completion], n_prompts: int) -> list[list[Completion]]:
    n = len(completions) // max(1, n_prompts)
    return [list(completions[index * n : (index + 1) * n]) for index in range(n_prompts)]
