"""The chunk store of plain options, as vLLM's JSON extra config carries them to the worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, refuse_unknown
from speccache_rag.store.base import ChunkStore
from speccache_rag.store.codec import LARGEST_CHUNK
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore

OPTIONS = {"path": "store", "ram_bytes": "ram_bytes", "disk_bytes": "disk_bytes", "kv_dtype": "kv_dtype"} | {
    "secret_file": "store_secret_file"
}
"""Options of a store, and the fields of `SpecCacheConfig` they are."""


def store_options(config: SpecCacheConfig) -> dict[str, Any]:
    """The options of a configuration's store, as `build_store` takes them."""
    return {name: getattr(config, field) for name, field in OPTIONS.items()}


def build_store(options: Mapping[str, Any]) -> ChunkStore:
    """The chunk store of these options: RAM, in front of a disk where there is a path. All may be left out.

    Raises:
        ConfigurationError: an option is unknown, the path is no local one, or the secret cannot be read.
        StoreUnavailable: the folder cannot be used.
    """
    refuse_unknown("store", options, list(OPTIONS))
    ram = MemoryStore(options.get("ram_bytes", SpecCacheConfig.model_fields["ram_bytes"].default))
    disk = build_disk(**{name: value for name, value in options.items() if name != "ram_bytes"})
    return ram if disk is None else TieredStore(disk, ram)


def build_disk(
    path: str | None = None,
    disk_bytes: int | None = None,
    kv_dtype: Any = "auto",
    secret_file: str | None = None,
) -> DiskStore | None:
    """The disk tier in a folder; None without one.

    Raises:
        ConfigurationError: the path is no local one, or the secret cannot be read.
        StoreUnavailable: the folder cannot be used.
    """
    if path is None:
        return None
    if "://" in str(path):
        raise ConfigurationError(f"Store {path!r} is no local folder.", hint="Pass a folder, or None for RAM.")
    largest = LARGEST_CHUNK if disk_bytes is None else min(LARGEST_CHUNK, disk_bytes)
    return DiskStore(path, disk_bytes, secret=_secret(secret_file), kv_dtype=kv_dtype, largest=largest)


def _secret(file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"The secret of the store cannot be read from {file!r}: {error.strerror or error}.",
            hint="Write one with: openssl rand -hex 32 > FILE; chmod 600 FILE.",
        ) from error
    if len(secret) < 16:
        raise ConfigurationError(
            f"The secret of the store in {file!r} has {len(secret)} bytes; 16 is the least.",
            hint="Write one with: openssl rand -hex 32 > FILE.",
        )
    return secret
