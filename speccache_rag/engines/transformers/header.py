"""`Header`: the KV of what stands before a prompt's first chunk."""

from __future__ import annotations

from speccache_rag.engines.reuse.fill import Stretch
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.engines.transformers.cache import ReuseCache, chunk_kv
from speccache_rag.types import ChunkKV

KEPT_TOKENS = 512
"""A longer header is a conversation's history, which is another one each time."""


class Header:
    """KV of the header, which the prompts of a pipeline share; exact, as nothing precedes it."""

    def __init__(self) -> None:
        self._kv: ChunkKV | None = None

    def write(self, cache: ReuseCache, rope: RopeTable, token_ids: tuple[int, ...]) -> int:
        """Write it into a prompt that begins with the same tokens; how many were written."""
        if self._kv is None or self._kv.token_ids != token_ids:
            return 0
        cache.write([Stretch(self._kv, 0, 0, len(token_ids))], rope)
        return len(token_ids)

    def keep(self, cache: ReuseCache, token_ids: tuple[int, ...]) -> None:
        """Take it from a prompt's computed KV, where it may come again."""
        if 0 < len(token_ids) <= KEPT_TOKENS and (self._kv is None or self._kv.token_ids != token_ids):
            self._kv = chunk_kv(cache, token_ids)
