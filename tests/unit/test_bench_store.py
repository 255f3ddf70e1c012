from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from speccache_rag.cli.app import app


def test_every_tier_is_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--tokens", "64", "--chunks", "4", "--layers", "2", "--known", "200", "--rounds", "2", "--full-ttft", "1"]
    result = CliRunner().invoke(app, ["bench", "store", "--folder", str(tmp_path), *sizes, "--json", str(out)])
    assert result.exit_code == 0, (result.output, result.exception)
    measured = json.loads(out.read_text())
    assert [tier["tier"] for tier in measured["tiers"]][:2] == ["memory copy", "RAM"]
    assert all(tier["bytes"] == 64 * 2 * 2 * 2 * 128 * 2 and tier["load_s"] > 0 for tier in measured["tiers"])
    assert measured["catalogue"]["n_chunks"] == 200
    assert measured["catalogue"]["find_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
