"""Names and plain dicts to objects: the form in which options come from CLI flags and vLLM's JSON extra config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError
from speccache_rag.fingerprint import resolve_model
from speccache_rag.layers import LayerRange
from speccache_rag.scoring.speculative import SpeculativeScorer
from speccache_rag.selection import POLICIES
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.store.base import ChunkStore
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore


def build_policy(name: str, options: Mapping[str, Any] | None = None) -> SelectionPolicy:
    """The selection policy called `name`; `options` are the fields of its dataclass.

    Raises:
        ConfigurationError: the name or an option is unknown, or an option is out of range.
    """
    policy_class = POLICIES.load(name)
    if not (isinstance(policy_class, type) and issubclass(policy_class, SelectionPolicy)):
        raise ConfigurationError(
            f"Policy {name!r} is {policy_class!r}, which is no SelectionPolicy.",
            hint="Let the entry point name a subclass of speccache_rag.selection.base.SelectionPolicy.",
        )
    options = options or {}
    _refuse_unknown(f"policy {name!r}", options, [field.name for field in dataclasses.fields(policy_class)])
    try:
        return policy_class(**options)
    except TypeError as error:
        raise ConfigurationError(f"Policy {name!r} cannot be made: {error}.", hint="") from error


def build_store(options: Mapping[str, Any]) -> ChunkStore:
    """The chunk store of `{"path": str | None, "ram_bytes": int}`: RAM, in front of a disk where there is a path.

    Both may be left out: no path, and the default of `SpecCacheConfig.ram_bytes`.

    Raises:
        ConfigurationError: an option is unknown or the path is no local one.
        StoreUnavailable: the folder cannot be used.
    """
    _refuse_unknown("store", options, ["path", "ram_bytes"])
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


def build_scorer(config: SpecCacheConfig, layers: LayerRange = "last_third") -> SpeculativeScorer | None:
    """The scorer over `config.speculative_model`, not yet loaded; None where no such model is configured.

    Raises:
        ConfigurationError: the model cannot be found.
    """
    if config.speculative_model is None:
        return None
    return SpeculativeScorer(resolve_model(config.speculative_model), layers=layers)


def _refuse_unknown(owner: str, options: Mapping[str, Any], known: list[str]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"Unknown options of {owner}: {', '.join(unknown)}.", hint=f"Known: {', '.join(known) or 'none'}."
        )
