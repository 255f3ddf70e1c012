"""A speculative model whose context is shorter than the prompts of its target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speccache_rag import SpecCache
from tests.parity.engines import CHUNKS
from tests.tiny import tiny_model

QUESTION = "When was the mill of Arden built?"
CONTEXT = 128


@pytest.fixture
def sc(tiny_folder: Path, tmp_path: Path) -> Iterator[SpecCache]:
    small = tiny_model(tmp_path / "small", max_position_embeddings=CONTEXT)
    options: dict[str, Any] = {
        "model": str(tiny_folder),
        "speculative_model": str(small),
        "policy": "attended",
        "engine": "transformers",
        "engine_options": {"device": "cpu", "dtype": "float32", "max_model_len": 1024},
    }
    with SpecCache(**options) as running:
        yield running


def test_a_prompt_too_long_for_it_is_scored_online(sc: SpecCache) -> None:
    sc.warm(CHUNKS, show_progress=False)
    report = sc.generate("\n\n".join([*CHUNKS, QUESTION]), max_tokens=1).report
    assert report.prompt_tokens > CONTEXT
    assert (report.scoring, report.chunks_reused) == ("online", len(CHUNKS))
    assert sc.generate(f"{CHUNKS[0]}\n\n{QUESTION}", max_tokens=1).report.scoring == "attended"


def test_a_chunk_too_long_for_it_is_warmed_for_the_target(sc: SpecCache, caplog: pytest.LogCaptureFixture) -> None:
    long = " ".join(CHUNKS * 2)
    assert sc.warm([long, CHUNKS[0]], show_progress=False).n_captured == 2
    assert "not warmed for the speculative model" in caplog.text
    report = sc.generate(f"{long}\n\n{QUESTION}", max_tokens=1).report
    assert (report.scoring, report.chunks_reused) == ("online", 1)
