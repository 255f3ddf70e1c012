from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.inventory import DAY_S, idle_for, not_among, of_other_models, open_inventory, to_give_up
from speccache_rag.cli.app import app
from speccache_rag.errors import ConfigurationError, StoreUnavailable
from speccache_rag.store.base import Namespace
from speccache_rag.store.disk import DiskStore
from speccache_rag.types import Chunk, ChunkKey
from tests.contract.store_contract import make_kv

MODELS = ("small", "large")
TENANTS = ("", "ours")
TEXTS = [f"The keeper of lighthouse {i} wrote down the weather of that day." for i in range(3)]


def key_of(model: str, tenant: str, number: int) -> ChunkKey:
    return Namespace(model, "float32", "{}", (), tenant or None).key(make_kv(seed=number).token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Three chunks of two models and two tenants. Text 2 has no KV, one file has no text, one chunk is pinned."""
    store, catalogue = DiskStore(tmp_path), Catalogue(str(tmp_path / "catalogue.sqlite"))
    for model in MODELS:
        for tenant in TENANTS:
            digest = Namespace(model, "float32", "{}", (), tenant or None).digest
            catalogue.describe(digest, {"model": model, "tenant": tenant, "dtype": "float32"})
            for number, text in enumerate(TEXTS):
                kv, key = make_kv(seed=number), key_of(model, tenant, number)
                catalogue.add(digest, Chunk(key, text, kv.token_ids, np.zeros((5, 2), np.int32)))
                if number < 2:
                    store.put(key, kv)
    store.put(key_of("third", "", 0), make_kv())
    store.pin([key_of("small", "", 0)])
    store.used(key_of("small", "", 1))
    store.close()
    return str(tmp_path)


def test_what_is_known_and_stored(folder: str) -> None:
    holdings = list(open_inventory(folder).holdings())
    assert len(holdings) == 13
    assert sum(h.file is not None for h in holdings) == 9
    assert [h.key for h in holdings if h.known is None] == [key_of("third", "", 0)]
    assert [h.key for h in holdings if h.pinned] == [key_of("small", "", 0)]
    assert {h.key: h.file.uses for h in holdings if h.file and h.file.uses} == {key_of("small", "", 1): 1}


def test_forget_leaves_neither_text_nor_kv(folder: str) -> None:
    inventory = open_inventory(folder)
    keys = inventory.keys_of([f"  {TEXTS[0]} ", key_of("large", "ours", 1), "unknown"], tenant="ours")
    assert set(keys) == {key_of("small", "ours", 0), key_of("large", "ours", 0), key_of("large", "ours", 1)}
    assert inventory.forget(keys) == 3
    assert inventory.forget(keys) == 0
    left = {h.key for h in inventory.holdings()}
    assert len(left) == 10
    assert not left & set(keys)
    assert not any(DiskStore(folder).contains(key) for key in keys)
    assert key_of("small", "", 0) in left, "another tenant's chunk of the same text"


def test_rules_add_up_and_spare_pins(folder: str) -> None:
    def gone(*rules: Any, **how: Any) -> set[ChunkKey]:
        return {h.key for h in to_give_up(open_inventory(folder).holdings(), rules, **how)}

    small = {key_of("small", tenant, number) for tenant in TENANTS for number in range(3)}
    assert gone(of_other_models("large")) == (small | {key_of("third", "", 0)}) - {key_of("small", "", 0)}
    assert gone(of_other_models("large"), pinned=True) == small | {key_of("third", "", 0)}
    kept = not_among([TEXTS[0], f"{TEXTS[1]}\n"])
    assert gone(kept) == {key_of(m, t, 2) for m in MODELS for t in TENANTS} | {key_of("third", "", 0)}
    assert gone(idle_for(1)) == set()
    assert gone(kept, idle_for(1)) == gone(kept)


def test_idle_is_counted_from_the_last_use(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3 * DAY_S)
    assert len(to_give_up(open_inventory(folder).holdings(), [idle_for(2)])) == 8, "all that is stored, but the pin"
    assert to_give_up(open_inventory(folder).holdings(), [idle_for(4)]) == []


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_inspect_gc_forget_check(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shown = run("inspect", "--store", folder, "--chunks", "--json", str(out))
    assert "small" in shown and "ours" in shown and "lighthouse 1" in shown
    groups = json.loads(out.read_text())["groups"]
    assert {(g["model"], g["tenant"], g["known"], g["stored"]) for g in groups} == {
        ("", "", 0, 1),
        *((model, tenant, 3, 2) for model in MODELS for tenant in TENANTS),
    }
    would = run("gc", "--store", folder, "--only-model", "large", "--dry-run", "--json", str(out))
    assert "would be given up" in would
    assert len(json.loads(out.read_text())["chunks"]) == 6
    run("gc", "--store", folder, "--only-model", "large")
    run("forget", TEXTS[0], "--store", folder)
    left = list(open_inventory(folder).holdings())
    assert {(h.about("model"), h.known.text if h.known else "") for h in left} == {("large", t) for t in TEXTS[1:]}
    assert "0 problems" in run("check", "--store", folder)
    os.truncate(DiskStore(folder)._file(key_of("large", "ours", 1)), 9)
    assert "2 problems" in run("check", "--store", folder, code=1)
    run("check", "--store", folder, "--fix")


def test_no_rule_and_no_store_are_errors(folder: str, tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(app, ["gc", "--store", folder]).exception, ConfigurationError)
    for command in ("inspect", "check"):
        result = CliRunner().invoke(app, [command, "--store", str(tmp_path / "absent")])
        assert isinstance(result.exception, StoreUnavailable)
    assert not (tmp_path / "absent").exists()
