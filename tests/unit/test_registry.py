from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from speccache_rag import registry
from speccache_rag.errors import ConfigurationError
from speccache_rag.registry import Registry
from speccache_rag.selection import POLICIES
from speccache_rag.selection.speccache import SpecCachePolicy


def test_loads_a_builtin() -> None:
    assert POLICIES.load("speccache") is SpecCachePolicy
    assert POLICIES.names() == sorted(
        ["speccache", "attended", "cacheblend", "epic", "full_reuse", "full_recompute", "random"]
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown policy 'spekcache'\. Known: .*speccache"):
        POLICIES.load("spekcache")


def test_a_missing_package_costs_nothing_until_it_is_used() -> None:
    broken = Registry("thing", {"absent": "no_such_package_anywhere:Thing"})
    assert broken.names() == ["absent"]
    with pytest.raises(ModuleNotFoundError):
        broken.load("absent")


def test_entry_points_complete_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        EntryPoint("counter", "collections:Counter", "things"),
        EntryPoint("mine", "collections:OrderedDict", "things"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in found if e.group == group])
    things = Registry("thing", {"mine": "collections:deque"}, entry_point_group="things")
    assert things.names() == ["counter", "mine"]
    assert things.load("counter").__name__ == "Counter"
    assert things.load("mine").__name__ == "deque", "a built-in name cannot be taken over"
    assert Registry("thing", {}, entry_point_group="others").names() == []


def test_importing_the_table_imports_no_policy() -> None:
    code = (
        "import sys, speccache_rag.selection;"
        "assert 'speccache_rag.selection.speccache' not in sys.modules;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_import_path_needs_no_name() -> None:
    assert POLICIES.load("speccache_rag.selection.speccache:SpecCachePolicy") is SpecCachePolicy


@pytest.mark.parametrize("path", ["no_such_module:Thing", "collections:NoSuchThing", ":Thing", "collections:", "..x:y"])
def test_a_wrong_import_path_says_what_is_wrong(path: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Policy '{path}' cannot be imported: .*Write module:attribute"):
        POLICIES.load(path)
