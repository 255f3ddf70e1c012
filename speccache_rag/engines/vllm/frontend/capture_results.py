"""The results of captures, fetched from the worker when its store has written them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from speccache_rag.errors import SpecCacheError

POLL_S = (0.005, 0.1)
"""Seconds between two looks, doubling from the first to the second: a look interrupts vLLM's steps."""

Fetch = Callable[[Sequence[str]], Awaitable[dict[str, int | dict[str, str]]]]
"""Asks the worker which of some captures ended; each result is given once."""


class CaptureResults:
    """One look at the worker serves all captures that wait. Its coroutines belong to the engine's event loop."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def result(self, tag: str) -> int:
        """Stored bytes of a capture.

        Raises:
            StoreError: it could not be written.
            EngineError: it did not complete.
        """
        waiting = self._waiting[tag] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            nbytes: int = await waiting
            return nbytes
        finally:
            self._waiting.pop(tag, None)

    async def _look(self) -> None:
        pause_s = POLL_S[0]
        while self._waiting:
            try:
                ended = await self._fetch(list(self._waiting))
            except SpecCacheError as error:
                self._fail(error)
                return
            for tag, result in ended.items():
                if (waiting := self._waiting.get(tag)) is None or waiting.done():
                    continue
                if isinstance(result, int):
                    waiting.set_result(result)
                else:
                    waiting.set_exception(SpecCacheError.from_dict(result))
            pause_s = POLL_S[0] if ended else min(POLL_S[1], 2 * pause_s)
            await asyncio.sleep(pause_s)

    def _fail(self, error: SpecCacheError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
