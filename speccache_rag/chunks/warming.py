"""Warming: compute each chunk's KV, and its cached scores, once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.engines.base import CaptureRequest, CaptureResult, Engine
from speccache_rag.engines.reuse.kind import exact_kind
from speccache_rag.errors import PromptError, StoreBusy
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.types import BadText, Chunk, WarmReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_S = 0.1
"""Seconds to wait where the store has no room for another capture in its queue."""

NAMED = 5
"""Skipped texts a warning names; the report has them all."""

IN_FLIGHT = 16
"""Captures offered to the engine at once: enough to fill its batches, few enough to stop quickly."""


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """The distinct chunks of some texts, in their order."""

    chunks: list[Chunk]
    n_texts: int
    bad: tuple[BadText, ...] = ()
    """Texts that cannot be chunks."""


def plan_warm(library: ChunkLibrary, texts: Iterable[str], *, skip_bad: bool = False) -> WarmPlan:
    """The distinct chunks of `texts`. Checks every text before any work is done.

    Args:
        library: of the target model.
        texts: of any number.
        skip_bad: note texts that cannot be chunks, instead of raising an error at the first.

    Raises:
        EmptyChunk, ChunkTooLong, PromptError: a text cannot be a chunk; the message says which.
    """
    chunks: dict[str, Chunk] = {}
    bad: list[BadText] = []
    n_texts = 0
    for index, text in enumerate(only_texts(texts)):
        n_texts += 1
        try:
            chunk = library.chunk(text)
        except PromptError as error:
            if not skip_bad:
                raise type(error)(f"Text {index}: {error.message}", hint=error.hint) from error
            bad.append(BadText(index, error.message))
        else:
            chunks.setdefault(chunk.key, chunk)
    return WarmPlan(list(chunks.values()), n_texts, tuple(bad))


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
    keys = [chunk.key for chunk in chunks]
    present = {key for key, here in zip(keys, await engine.stored(keys), strict=True) if here}
    namespace, kind = library.namespace, exact_kind(library.namespace.tenant)
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(chunk: Chunk) -> tuple[int, int]:
        tokens = stored = 0
        async with gate:
            if chunk.key not in present:
                result = await captured(engine, CaptureRequest(chunk, namespace.anchor_ids, kind))
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
        n_held=int((await engine.stored(keys)).sum()),
        seconds=time.perf_counter() - started,
    )


def whole_report(plan: WarmPlan, target: WarmReport, speculative: WarmReport) -> WarmReport:
    """The report of a run over texts, from those of the target's and the speculative model's chunks.

    Logs a warning where texts were skipped, and where the store holds fewer chunks than there are: the rest will be
    computed anew in every prompt.
    """
    if plan.bad:
        # Their places only: reasons quote the text, and logs are read by others than texts are.
        places = ", ".join(str(bad.index) for bad in plan.bad[:NAMED]) + (", ..." if len(plan.bad) > NAMED else "")
        logger.warning(
            "%d of %d texts cannot be chunks and were skipped, at places %s; WarmReport.bad says why.",
            len(plan.bad),
            plan.n_texts,
            places,
        )
    if target.n_held < len(plan.chunks):
        logger.warning(
            "%d of %d chunks are held after warming: together they are larger than the store's budget (ram_bytes or "
            "disk_bytes). The others are computed anew when a prompt holds them.",
            target.n_held,
            len(plan.chunks),
        )
    return replace(
        target,
        n_texts=plan.n_texts,
        n_skipped=plan.n_texts - target.n_captured - len(plan.bad),
        bad=plan.bad,
        speculative_bytes=speculative.captured_bytes,
        seconds=target.seconds + speculative.seconds,
    )


async def captured(engine: Engine, request: CaptureRequest) -> CaptureResult:
    """One captured chunk; waits while the store has no room in its queue.

    Raises:
        StoreUnavailable: the KV could not be written.
    """
    while True:
        try:
            return await engine.capture(request)
        except StoreBusy:
            await asyncio.sleep(BUSY_S)


async def all_or_stop(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """All results; the first error stops the others and is raised as it is."""
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
