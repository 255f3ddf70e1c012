"""Fifty streams at once, from eight threads and two event loops, through both frameworks, on one engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.speccache import SpecCacheLLM

from langchain_speccache import ChatSpecCache
from speccache_rag import SpecCache
from speccache_rag.errors import EngineError
from tests.integration.processes import wait_until
from tests.parity.engines import CHUNKS

pytestmark = pytest.mark.vllm

THREADS, STREAMS_PER_THREAD = 8, 3
LOOPS, STREAMS_PER_LOOP = 2, 13
"""8 x 3 + 2 x 13 = 50."""

PROMPTS = ["\n\n".join([*texts, "Which of them is older?"]) for texts in itertools.permutations(CHUNKS, 2)]
POLICIES = ("speccache", "full_reuse", "full_recompute")
ASKS = list(itertools.islice(itertools.cycle(itertools.product(PROMPTS, POLICIES)), 50))

Ask = tuple[str, str]


class Streams:
    """The same request through LlamaIndex and through LangChain, as streams of new text."""

    def __init__(self, sc: SpecCache) -> None:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
        self._llama_index = SpecCacheLLM(runtime=sc, **options)
        self._langchain = ChatSpecCache(runtime=sc, **options)

    def llama_index(self, ask: Ask) -> Iterator[str]:
        for response in self._llama_index.stream_chat([ChatMessage(content=ask[0])], policy=ask[1], ignore_eos=True):
            yield response.delta or ""

    def langchain(self, ask: Ask) -> Iterator[str]:
        for chunk in self._langchain.stream(ask[0], policy=ask[1], ignore_eos=True):
            yield str(chunk.content)

    async def llama_index_async(self, ask: Ask) -> AsyncIterator[str]:
        messages = [ChatMessage(content=ask[0])]
        async for response in await self._llama_index.astream_chat(messages, policy=ask[1], ignore_eos=True):
            yield response.delta or ""

    async def langchain_async(self, ask: Ask) -> AsyncIterator[str]:
        async for chunk in self._langchain.astream(ask[0], policy=ask[1], ignore_eos=True):
            yield str(chunk.content)


def test_fifty_streams_give_the_texts_they_give_one_after_the_other(sc: SpecCache) -> None:
    sc.warm(CHUNKS, show_progress=False)
    streams = Streams(sc)
    alone = ["".join(streams.llama_index(ask)) for ask in ASKS]
    assert len(set(alone)) > 6, "the prompts must tell the answers apart"
    before = sc.stats()["requests"]

    in_threads = THREADS * STREAMS_PER_THREAD
    shares = [ASKS[i : i + STREAMS_PER_THREAD] for i in range(0, in_threads, STREAMS_PER_THREAD)]
    parts = [ASKS[i : i + STREAMS_PER_LOOP] for i in range(in_threads, len(ASKS), STREAMS_PER_LOOP)]
    assert (len(shares), len(parts)) == (THREADS, LOOPS)
    with ThreadPoolExecutor(THREADS + LOOPS) as pool:
        sync = [
            pool.submit(_interleaved, (streams.llama_index, streams.langchain)[i % 2], share)
            for i, share in enumerate(shares)
        ]
        loops = [
            pool.submit(asyncio.run, _gathered((streams.llama_index_async, streams.langchain_async)[i % 2], part))
            for i, part in enumerate(parts)
        ]
        together = [text for future in (*sync, *loops) for text in future.result()]

    assert together == alone
    assert sc.stats()["requests"] - before == 50
    assert wait_until(lambda: _idle(sc), seconds=10)


def test_streams_that_are_left_free_their_requests(sc: SpecCache) -> None:
    streams = Streams(sc)
    left = [streams.llama_index(ASKS[0]), streams.langchain(ASKS[1])]
    for stream in left:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    abandoned = streams.langchain(ASKS[2])
    next(abandoned)
    del abandoned
    assert wait_until(lambda: _idle(sc), seconds=10)


def _interleaved(stream: Callable[[Ask], Iterator[str]], asks: Sequence[Ask]) -> list[str]:
    """All streams open at once, a piece of each in turn."""
    texts = [""] * len(asks)
    running = dict(enumerate(map(stream, asks)))
    while running:
        for i, one in list(running.items()):
            piece = next(one, None)
            if piece is None:
                del running[i]
            else:
                texts[i] += piece
    return texts


async def _gathered(stream: Callable[[Ask], AsyncIterator[str]], asks: Sequence[Ask]) -> list[str]:
    async def whole(ask: Ask) -> str:
        return "".join([piece async for piece in stream(ask)])

    return await asyncio.gather(*map(whole, asks))


def _idle(sc: SpecCache) -> bool:
    """Whether vLLM has no request: only then may its cache be reset."""
    try:
        sc.reset_prefix_cache()
    except EngineError:
        return False
    return True
