"""The names users import. A change here is a change of the public interface: it belongs in the CHANGELOG."""

from __future__ import annotations

import speccache_rag

PUBLIC = ["SpecCache", "SpecCacheConfig"]


def test_public_names_are_pinned() -> None:
    assert sorted(speccache_rag.__all__) == PUBLIC


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in PUBLIC if not getattr(speccache_rag, name).__doc__] == []
