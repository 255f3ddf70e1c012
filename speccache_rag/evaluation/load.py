"""A load run: many requests at once or at random moments, and what each waited for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from speccache_rag.runtime import SpecCache

WORDS = (
    *("river", "copper", "lantern", "orchard", "signal", "meadow", "harbor", "velvet", "granite", "compass"),
    *("thunder", "willow", "ember", "cedar", "falcon", "marble", "the", "of", "and", "in", "with", "for"),
)


@dataclass(slots=True)
class Served:
    """One request's times."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between two pieces of text that follow each other."""
    tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One policy under one load. Seconds; `_p50` and so on are percentiles over requests, or over gaps."""

    policy: str
    rate_rps: float
    """Requests a second on average, at random (Poisson); 0: all at once."""
    requests: int
    seconds: float
    throughput_rps: float
    throughput_tokens_s: float
    prompt_tokens: int
    loaded_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_max_s: float
    gap_p50_s: float
    gap_p95_s: float
    gap_p99_s: float
    gap_max_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def made_up_chunks(n: int, words: int, seed: int = 0) -> list[str]:
    """Texts of random words, no two alike."""
    chance = random.Random(seed)
    return [f"Passage {i}. " + " ".join(chance.choice(WORDS) for _ in range(words)) for i in range(n)]


def made_up_prompts(chunks: Sequence[str], n: int, chunks_each: int, seed: int = 1) -> list[list[dict[str, str]]]:
    """Chats with some of the chunks in random order before a question."""
    chance = random.Random(seed)
    contexts = ["\n\n".join(chance.sample(list(chunks), chunks_each)) for _ in range(n)]
    return [
        [{"role": "user", "content": f"{context}\n\nQuestion {i}: what is this about?"}]
        for i, context in enumerate(contexts)
    ]


async def run_load(
    sc: SpecCache,
    prompts: Sequence[list[dict[str, str]]],
    *,
    policy: str,
    rate_rps: float,
    max_tokens: int,
    recompute_ratio: float | None = None,
    seed: int = 2,
) -> LoadResult:
    """Send every prompt once and wait for all answers; each is `max_tokens` long.

    The arrivals are the same for every policy. They do not wait for answers (an open loop), so that a slow engine is
    not spared by its own slowness.
    """
    chance = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in prompts:
        arrivals.append(at)
        at += chance.expovariate(rate_rps) if rate_rps else 0.0

    async def one(prompt: list[dict[str, str]], after_s: float) -> Served:
        await asyncio.sleep(after_s)
        served, last = Served(), time.perf_counter()
        started = last
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        if recompute_ratio is not None:
            options["recompute_ratio"] = recompute_ratio
        async for delta in sc.astream(prompt, policy=policy, **options):
            now = time.perf_counter()
            if delta.completion is not None:
                served.report = delta.completion.report.to_dict()
                served.tokens = delta.completion.usage.completion_tokens
            if not delta.text:
                continue
            if served.ttft_s:
                served.gaps_s.append(now - last)
            else:
                served.ttft_s = now - started
            last = now
        return served

    begun = time.perf_counter()
    served = await asyncio.gather(*[one(prompt, after) for prompt, after in zip(prompts, arrivals, strict=True)])
    return _summary(served, policy, rate_rps, time.perf_counter() - begun)


def _summary(served: Sequence[Served], policy: str, rate_rps: float, seconds: float) -> LoadResult:
    ttfts = [s.ttft_s for s in served]
    gaps = [gap for s in served for gap in s.gaps_s] or [0.0]
    figures: dict[str, Any] = {
        name: sum(s.report[name] for s in served)
        for name in ("prompt_tokens", "loaded_tokens", "recomputed_tokens", "cached_tokens")
    }
    for name, rank in {"p50": 50, "p95": 95, "p99": 99, "max": 100}.items():
        figures[f"ttft_{name}_s"] = float(np.percentile(ttfts, rank))
        figures[f"gap_{name}_s"] = float(np.percentile(gaps, rank))
    return LoadResult(
        policy=policy,
        rate_rps=rate_rps,
        requests=len(served),
        seconds=seconds,
        throughput_rps=len(served) / seconds,
        throughput_tokens_s=sum(s.tokens for s in served) / seconds,
        **figures,
    )
