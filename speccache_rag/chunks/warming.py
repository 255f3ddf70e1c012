"""Warming: compute each chunk's KV, and its cached scores, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.engines.base import CaptureRequest, Engine
from speccache_rag.engines.reuse.kind import exact_kind
from speccache_rag.errors import PromptError
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.types import Chunk, WarmReport

T = TypeVar("T")

IN_FLIGHT = 16
"""Captures offered to the engine at once: enough to fill its batches, few enough to stop quickly."""


def plan_warm(library: ChunkLibrary, texts: Iterable[str]) -> tuple[list[Chunk], int]:
    """The distinct chunks of `texts`, and how many texts there were. Checks every text before any work is done.

    Raises:
        EmptyChunk, ChunkTooLong, PromptError: a text cannot be a chunk; the message says which.
    """
    chunks: dict[str, Chunk] = {}
    n_texts = 0
    for text in only_texts(texts):
        chunk = library.chunk(text)
        chunks.setdefault(chunk.key, chunk)
        n_texts += 1
    return list(chunks.values()), n_texts


def only_texts(texts: Iterable[str]) -> Iterator[str]:
    """The texts one by one.

    Raises:
        PromptError: one of them is no text; or all are one text, which to Python is many, a character long each.
    """
    if isinstance(texts, str):
        raise PromptError(f"Chunk texts were given as one text, {texts[:40]!r}...", hint="Pass a list of texts.")
    for text in texts:
        if not isinstance(text, str):
            raise PromptError(f"A chunk is {text!r}, which is no text.")
        yield text


async def warm_chunks(
    engine: Engine,
    library: ChunkLibrary,
    scorer: SpeculativeScorer | None,
    chunks: Sequence[Chunk],
    advance: Callable[[], None] = lambda: None,
) -> WarmReport:
    """Capture what the store lacks, score what the catalogue lacks; `advance` is called once a chunk.

    A chunk is learned when its KV is stored, so an interrupted run leaves a store that is right as far as it goes, and
    the next run takes up there.

    Raises:
        StoreUnavailable: KV could not be written.
    """
    started = time.perf_counter()
    held = engine.present([chunk.key for chunk in chunks])
    present = {chunk.key for chunk, here in zip(chunks, held, strict=True) if here}
    namespace, kind = library.namespace, exact_kind(library.namespace.tenant)
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(chunk: Chunk) -> tuple[int, int]:
        tokens = stored = 0
        async with gate:
            if chunk.key not in present:
                result = await engine.capture(CaptureRequest(chunk, namespace.anchor_ids, kind))
                tokens, stored = result.n_tokens, result.nbytes
            # On a thread: SQLite may have to wait for another process.
            await asyncio.to_thread(library.learn, chunk)
            if scorer is not None:
                await asyncio.to_thread(library.scores, chunk, scorer)
        advance()
        return tokens, stored

    done = await all_or_stop([asyncio.create_task(one(chunk)) for chunk in chunks])
    return WarmReport(
        n_texts=len(chunks),
        n_captured=len(chunks) - len(present),
        n_skipped=len(present),
        captured_tokens=sum(tokens for tokens, _ in done),
        captured_bytes=sum(stored for _, stored in done),
        seconds=time.perf_counter() - started,
    )


async def all_or_stop(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """All results; the first error stops the others and is raised as it is."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
