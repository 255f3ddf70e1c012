"""What a running `SpecCache` runs on, for tests that look behind it."""

from __future__ import annotations

from speccache_rag import SpecCache
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.types import Chunk


def host_of(sc: SpecCache) -> EngineHost:
    """Its host, which it keeps alive."""
    host = EngineHost.acquire(sc.config)
    host.release()
    return host


def library_of(sc: SpecCache) -> ChunkLibrary:
    """The chunks it knows."""
    return host_of(sc).library(sc.config)


def known(sc: SpecCache, text: str) -> Chunk:
    """The chunk of a text."""
    return library_of(sc).chunk(text)
