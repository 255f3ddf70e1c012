"""A tiny real engine for every LlamaIndex pipeline; nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from speccache_rag import SpecCache


@pytest.fixture(scope="module")
def runtime(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A tiny random model that holds all of `shapes.CHUNKS`."""
    from speccache_rag import SpecCache
    from tests.integration.llama_index.shapes import CHUNKS

    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        policy="speccache",
        engine="transformers",
        store=str(tmp_path_factory.mktemp("store")),
        admission="first",
        engine_options={"device": "cpu", "dtype": "float32", "max_model_len": 4096},
    ) as running:
        running.warm(CHUNKS.values(), show_progress=False)
        yield running


@pytest.fixture
def settings() -> Iterator[None]:
    """Nothing of LlamaIndex's own is asked for a model: what a shape does not name, it does not need."""
    from llama_index.core import MockEmbedding, Settings

    before = Settings._llm, Settings._embed_model
    Settings.embed_model = MockEmbedding(8)
    yield
    Settings._llm, Settings._embed_model = before
