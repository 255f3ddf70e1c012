"""Chunk texts that a prompt will soon hold, from `SpecCache.prefetch` until they are known chunks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.warming import only_texts
from speccache_rag.errors import PromptError, StoreError
from speccache_rag.types import ChunkKey

logger = logging.getLogger(__name__)


class PrefetchQueue:
    """Texts wait here until somebody learns them; any thread may put and learn."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}
        self._lock = threading.Lock()
        self._learning = threading.Lock()

    def put(self, texts: Iterable[str]) -> bool:
        """Keep the texts; the same text twice waits once. Whether none waited before.

        Raises:
            PromptError: one text was given instead of several, or something that is no text.
        """
        new = dict.fromkeys(only_texts(texts))  # the caller's own iterator runs outside the lock
        with self._lock:
            first = not self._texts
            self._texts |= new
        return first

    def learn(self, library: ChunkLibrary) -> list[ChunkKey]:
        """Make the waiting texts known chunks; returns their keys. Waits for a call that is at it already.

        A text that cannot be a chunk is passed over, and a broken catalogue costs no more than the head start: a
        prefetch never fails the request that comes after it.
        """
        with self._learning:
            with self._lock:
                texts, self._texts = self._texts, {}
            keys: list[ChunkKey] = []
            for text in texts:
                try:
                    chunk = library.chunk(text)
                    library.learn(chunk)
                except PromptError as error:
                    logger.debug("not prefetched: %s", error)
                except StoreError as error:
                    logger.warning("%d chunks were not prefetched: %s", len(texts) - len(keys), error)
                    break
                else:
                    keys.append(chunk.key)
            return keys
