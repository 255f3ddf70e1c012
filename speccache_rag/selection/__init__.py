"""Selection policies: which chunk tokens to recompute. One dataclass and one file each, found by name."""

from __future__ import annotations

from speccache_rag.registry import Registry

POLICIES = Registry(
    "policy",
    {
        "speccache": "speccache_rag.selection.speccache:SpecCachePolicy",
        "attended": "speccache_rag.selection.attended:Attended",
        "cacheblend": "speccache_rag.selection.cacheblend:CacheBlend",
        "epic": "speccache_rag.selection.epic:Epic",
        "full_reuse": "speccache_rag.selection.baselines:FullReuse",
        "full_recompute": "speccache_rag.selection.baselines:FullRecompute",
        "random": "speccache_rag.selection.baselines:RandomSelection",
    },
    entry_point_group="speccache_rag.policies",
)
"""Third parties add a policy through the entry-point group `speccache_rag.policies`."""

WRAPPERS = Registry(
    "wrapper",
    {
        "heads": "speccache_rag.selection.heads:Heads",
        "grouped": "speccache_rag.selection.grouped:Grouped",
    },
    entry_point_group="speccache_rag.wrappers",
)
"""Policies that stand before a + and change what another one is told or allowed (selection/expression.py)."""

__all__ = ["POLICIES", "WRAPPERS"]
