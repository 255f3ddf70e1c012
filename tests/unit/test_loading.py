"""Tokenizers and models that come with code, and the options that every loader takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.errors import ConfigurationError
from speccache_rag.fingerprint import resolve_model
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.prompt.loading import load_tokenizer
from speccache_rag.scoring.importance import SpeculativeScorer

CODE = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def with_code(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer is code in its own folder."""
    folder = tmp_path_factory.mktemp("with_code") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "own_tokenizer.py").write_text(CODE)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}
    config["tokenizer_class"] = "OwnTokenizer"
    file.write_text(json.dumps(config))
    return folder


TRUSTED = {"trust_remote_code": True}


def test_code_that_is_trusted_is_run(with_code: Path) -> None:
    assert type(load_tokenizer(with_code, TRUSTED)).__name__ == "OwnTokenizer"


def test_code_that_is_not_is_refused_by_name_and_nobody_is_asked(
    with_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ConfigurationError, match=r"code of its own.*engine_options=\{'trust_remote_code': True\}"):
        load_tokenizer(with_code, {})


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_the_option_reaches_the_host(with_code: Path, engine: str) -> None:
    def tokenizer_of(options: dict[str, Any]) -> Any:
        host = EngineHost.acquire(SpecCacheConfig(model=str(with_code), engine=engine, engine_options=options))
        try:
            return host.tokenizer.tokenizer
        finally:
            host.release()

    assert type(tokenizer_of(TRUSTED)).__name__ == "OwnTokenizer"
    with pytest.raises(ConfigurationError, match="code of its own"):
        tokenizer_of({})


async def test_the_option_reaches_the_transformers_engine_and_the_scorer(with_code: Path) -> None:
    options = {**TRUSTED, "device": "cpu", "dtype": "float32"}
    engine = TransformersEngine(with_code, options, {"path": None, "ram_bytes": 1 << 20})
    await engine.start()
    engine.close()
    offsets, scores = SpeculativeScorer(with_code, trust_remote_code=True).score("The keeper of the lighthouse.")
    assert len(offsets) == len(scores) > 3


def test_another_tokenizer_may_be_named(tiny_folder: Path, with_code: Path) -> None:
    found = load_tokenizer(with_code, {"tokenizer": str(tiny_folder)})
    assert type(found).__name__ != "OwnTokenizer"
    with pytest.raises(ConfigurationError, match="The tokenizer of 'no/such' cannot be loaded"):
        load_tokenizer(tiny_folder, {"tokenizer": "no/such"})


@pytest.mark.parametrize("mode", ["slow", "mistral", "custom"])
def test_a_mode_without_offsets_is_refused_by_name(tiny_folder: Path, mode: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tokenizer_mode is '{mode}'"):
        load_tokenizer(tiny_folder, {"tokenizer_mode": mode})


def test_a_revision_is_asked_of_the_hub(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: asked.update(kw) or str(tiny_folder))
    assert resolve_model("org/model", revision="v2") == tiny_folder
    assert asked["revision"] == "v2"
    resolve_model("org/model")
    assert asked["revision"] is None
