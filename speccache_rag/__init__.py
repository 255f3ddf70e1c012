"""Reuse the KV of retrieved chunks anywhere in a prompt, and recompute only the tokens that matter.

from speccache_rag import SpecCache
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speccache_rag.config import SpecCacheConfig

if TYPE_CHECKING:
    from speccache_rag.runtime import SpecCache

__all__ = ["SpecCache", "SpecCacheConfig"]


def __getattr__(name: str) -> Any:
    # SpecCache needs torch and transformers; importing the package must not.
    if name == "SpecCache":
        from speccache_rag.runtime import SpecCache

        return SpecCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
