"""Fixtures of every test. Nothing here imports a model library before a test asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from speccache_rag import SpecCache

ROOT = Path(__file__).resolve().parent.parent

NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",  # Chroma
    "DO_NOT_TRACK": "1",  # vLLM
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-docs", action="store_true", help="write the tables in docs/ that tests measure")


def pytest_configure() -> None:
    # Before collection: these are read once, when the libraries are imported.
    os.environ.update(NO_NETWORK)


@pytest.fixture(scope="session")
def update_docs(request: pytest.FixtureRequest) -> bool:
    """Whether measured tables are written to docs/ (tests/doc_tables.py)."""
    return bool(request.config.getoption("--update-docs"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random float32 weights and a ChatML tokenizer."""
    from tests.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a small model that really answers."""
    return _fetched("SmolLM2-135M-Instruct")


def _fetched(name: str) -> Path:
    folder = ROOT / ".models" / name
    if not (folder / "config.json").exists():
        pytest.skip(f"{name} is not in .models; `make test` fetches it")
    return folder


def tiny_engine_options(**overrides: object) -> dict[str, object]:
    """vLLM options for tiny models: exact arithmetic, quick start, batches smaller than the prompts."""
    return {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 256 << 20,
        **overrides,
    }


@pytest.fixture(scope="session")
def sc(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A running SpecCache over a tiny random Llama, for all tests that need an engine and leave it as they found it."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from speccache_rag import SpecCache

    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        policy="speccache",
        store=str(tmp_path_factory.mktemp("store")),
        admission="first",
        ram_bytes=1,  # nothing stays in RAM: what a test does to the files is seen
        engine_options=tiny_engine_options(),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def tsc(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """The same on the Transformers engine; needs no vLLM."""
    from speccache_rag import SpecCache

    with SpecCache(
        model=str(tiny_folder),
        speculative_model=str(tiny_folder),
        policy="speccache",
        engine="transformers",
        store=str(tmp_path_factory.mktemp("store")),
        admission="first",
        ram_bytes=1,
        engine_options={"device": "cpu", "dtype": "float32", "max_model_len": 1024},
    ) as running:
        yield running
