"""Fixtures of every test. Nothing here imports a model library before a test asks for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",  # Chroma
    "DO_NOT_TRACK": "1",  # vLLM
}


def pytest_configure() -> None:
    # Before collection: these are read once, when the libraries are imported.
    os.environ.update(NO_NETWORK)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random float32 weights and a ChatML tokenizer."""
    from tests.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a small model that really answers."""
    folder = ROOT / ".models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip(f"{folder.name} is not in .models; `make test` fetches it")
    return folder
