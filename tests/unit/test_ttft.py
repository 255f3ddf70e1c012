"""Time to first token: turns, medians, the prefix-cache baseline, and random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speccache_rag.cli.app import app
from speccache_rag.errors import ConfigurationError
from speccache_rag.evaluation.contestants import Contestant
from speccache_rag.evaluation.random_model import SHAPES, write_random_model
from speccache_rag.evaluation.ttft import PREFIX_CACHE, Stopwatch, shuffled
from speccache_rag.types import Completion, PrefillReport, Usage

PROMPTS = [[{"role": "user", "content": name}] for name in ("a", "b", "c")]


class Engine:
    """A runtime that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reset_prefix_cache(self) -> None:
        self.asked.append("reset")

    def generate(self, prompt: Any, *, policy: str, recompute_ratio: float, **_sampling: Any) -> Completion:
        self.asked.append(f"{prompt[0]['content']} {policy}@{recompute_ratio}")
        loaded = 0 if policy == "full_recompute" else 75
        report = PrefillReport(prompt_tokens=100, loaded_tokens=loaded)
        return Completion("x", report, Usage(100, 1), "length")


def test_contestants_take_turns_from_an_empty_prefix_cache() -> None:
    engine = Engine()
    watch = Stopwatch(engine, [Contestant("epic", 0.1), Contestant("full_reuse", 0.0)])  # type: ignore[arg-type]
    watch.round(PROMPTS[:2], lambda: None)
    turns = [asked for asked in engine.asked if asked != "reset"]
    assert turns[:3] == ["a full_recompute@1.0", "a epic@0.1", "a full_reuse@0.0"]
    assert turns[3:] == ["b epic@0.1", "b full_reuse@0.0", "b full_recompute@1.0"]
    assert engine.asked[::2] == ["reset"] * 6


def test_rows_compare_with_full_recompute_and_with_the_limit() -> None:
    watch = Stopwatch(Engine(), [Contestant("epic", 0.1)])  # type: ignore[arg-type]
    watch.round(PROMPTS, lambda: None)
    watch._seconds = {"full_recompute": [4.0, 2.0, 3.0], "epic@0.1": [1.0, 1.5, 0.5]}
    full, epic = watch.rows()
    assert (full.label, full.speedup, full.of_limit) == ("full_recompute", 1.0, 1.0)
    assert (epic.label, epic.ttft_median_s, epic.speedup, epic.n) == ("epic@0.1", 1.0, 3.0, 3)
    assert epic.of_limit == pytest.approx(3.0 * 25 / 100)


def test_the_prefix_cache_is_a_baseline_on_repeated_and_on_shuffled_chunks() -> None:
    orders = list(shuffled([["1", "2", "3"], ["4", "5", "6"]]))
    assert [order for order, _ in orders] == ["", "same order", "another order"] * 2
    for start in (0, 3):
        first, again, other = (chunks for _, chunks in orders[start : start + 3])
        assert first == again and sorted(other) == sorted(first) and other[0] != first[0]
    engine = Engine()
    watch = Stopwatch(engine, [])  # type: ignore[arg-type]
    watch.prefix_cache(PROMPTS, [order for order, _ in orders[:3]], lambda: None)
    assert engine.asked.count("reset") == 1
    assert list(watch._seconds) == [f"{PREFIX_CACHE}, {order}" for order, _ in orders[1:3]]


def test_the_command_on_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**SHAPES["qwen2.5-0.5b"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    monkeypatch.setitem(SHAPES, "tiny", {**tiny, "num_hidden_layers": 3})  # type: ignore[arg-type]
    file = tmp_path / "ttft.json"
    result = CliRunner().invoke(
        app,
        [
            *("bench", "ttft", "--shape", "tiny", "--layers", "2", "--dtype", "float32", "--json", str(file)),
            *("--tokens", "600", "--chunks", "3", "--prompts", "2", "--rounds", "1"),
            *("--policies", "full_reuse,epic@0.1,attended(target)@0.1", "--engine-option", "device=cpu"),
        ],
    )
    assert result.exit_code == 0, result.output
    rows = {row["label"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["full_recompute", "full_reuse", "epic@0.1", "attended(target)@0.1"]
    assert rows["full_recompute"]["computed_tokens"] == rows["full_recompute"]["prompt_tokens"] > 500
    assert rows["full_reuse"]["computed_tokens"] < rows["epic@0.1"]["computed_tokens"] < 300
    assert rows["attended(target)@0.1"]["score_median_s"] > 0 == rows["epic@0.1"]["score_median_s"]


def test_an_unknown_shape_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"shape is 'llama'\. Known: llama-3-8b, qwen2\.5-14b"):
        write_random_model(tmp_path, "llama", dtype=torch.float32)
