"""Chunk KV is read while tokens are scored, and the report says what that hid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speccache_rag import SpecCache
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.store.disk import DiskStore
from tests.parity.engines import CHUNKS

READ_S = 0.1
PROMPT = "\n\n".join([*CHUNKS, "When was the mill of Arden built?"])


@pytest.fixture
def slow_disk(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpecCache]:
    """Every chunk takes READ_S to read; scoring takes longer than all of them."""
    options: dict[str, Any] = {
        "model": str(tiny_folder),
        "speculative_model": str(tiny_folder),
        "policy": "speccache",
        "engine": "transformers",
        "store": str(tmp_path),
        "engine_options": {"device": "cpu", "dtype": "float32", "max_model_len": 1024},
    }
    with SpecCache(**options) as warming:
        warming.warm(CHUNKS, show_progress=False)
    with SpecCache(**options).start() as sc:  # whose RAM holds nothing yet
        _slow_down(monkeypatch, DiskStore, "get", READ_S)
        _slow_down(monkeypatch, SpeculativeScorer, "score", READ_S * (len(CHUNKS) + 2))
        yield sc


def _slow_down(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return original(*args)

    monkeypatch.setattr(owner, name, slow)


def test_loading_hides_behind_scoring(slow_disk: SpecCache) -> None:
    report = slow_disk.generate(PROMPT, scoring="online", max_tokens=1).report
    assert report.chunks_reused == len(CHUNKS)
    assert report.load_hidden_s >= READ_S * len(CHUNKS)
    assert report.load_s < READ_S


def test_what_was_not_hidden_is_in_the_ttft(slow_disk: SpecCache) -> None:
    report = slow_disk.generate(PROMPT, policy="full_reuse", max_tokens=1).report
    assert report.load_s >= READ_S
    parts = report.score_s + report.align_s + report.load_s + report.recompute_s + report.prefill_s
    assert parts == pytest.approx(report.ttft_s)


def test_a_retriever_that_prefetches_hides_all_of_it(slow_disk: SpecCache) -> None:
    slow_disk.prefetch(CHUNKS)
    time.sleep(READ_S * (len(CHUNKS) + 2))  # the pipeline makes its prompt
    report = slow_disk.generate(PROMPT, policy="full_reuse", max_tokens=1).report
    assert report.load_hidden_s >= READ_S * len(CHUNKS)
    assert report.load_s < READ_S
