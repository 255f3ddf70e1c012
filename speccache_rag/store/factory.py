"""The chunk store of plain options, as vLLM's JSON extra config carries them to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, refuse_unknown
from speccache_rag.store.base import ChunkStore
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore


def build_store(options: Mapping[str, Any]) -> ChunkStore:
    """The chunk store of `{"path": str | None, "ram_bytes": int}`: RAM, in front of a disk where there is a path.

    Both may be left out: no path, and the default of `SpecCacheConfig.ram_bytes`.

    Raises:
        ConfigurationError: an option is unknown or the path is no local one.
        StoreUnavailable: the folder cannot be used.
    """
    refuse_unknown("store", options, ["path", "ram_bytes"])
    ram = MemoryStore(options.get("ram_bytes", SpecCacheConfig.model_fields["ram_bytes"].default))
    disk = build_disk(options.get("path"))
    return ram if disk is None else TieredStore(disk, ram)


def build_disk(path: str | None) -> DiskStore | None:
    """The disk tier in a folder; None without one.

    Raises:
        ConfigurationError: the path is no local one.
        StoreUnavailable: the folder cannot be used.
    """
    if path is None:
        return None
    if "://" in str(path):
        raise ConfigurationError(f"Store {path!r} is no local folder.", hint="Pass a folder, or None for RAM.")
    return DiskStore(path)
