"""Where chunk KV lives between requests: keys, codec, the RAM and disk tiers, and the catalogue of known chunks."""

from __future__ import annotations

from speccache_rag.store.base import ChunkStore, Namespace, StoreStats
from speccache_rag.store.catalogue import Catalogue
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore

__all__ = ["Catalogue", "ChunkStore", "DiskStore", "MemoryStore", "Namespace", "StoreStats", "TieredStore"]
