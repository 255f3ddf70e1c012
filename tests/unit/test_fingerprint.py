from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from speccache_rag.errors import ConfigurationError
from speccache_rag.fingerprint import model_fingerprint, resolve_model

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with 8 MiB of weights: larger than the edges and samples together."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text('{"model": {}}')
    (path / "model.safetensors").write_bytes(bytes(8 * MIB))
    return path


def test_the_same_wherever_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert model_fingerprint(moved) == model_fingerprint(folder)
    assert len(model_fingerprint(folder)) == 64


def test_files_that_leave_kv_alone_do_not_count(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    (folder / "README.md").write_text("A model.")
    assert model_fingerprint(folder) == before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "more.safetensors",
        "model.gguf",
    ],
)
def test_files_that_decide_kv_count(folder: Path, name: str) -> None:
    before = model_fingerprint(folder)
    (folder / name).write_text('{"changed": true}')
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("at", [0, MIB - 1, 7 * MIB, 8 * MIB - 1, (8 * MIB - (64 << 10)) * 31 // 63 + 5])
def test_a_changed_byte_of_the_edges_or_a_sample_counts(folder: Path, at: int) -> None:
    before = model_fingerprint(folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(at)
        weights.write(b"\x01")
    assert model_fingerprint(folder) != before


def test_the_size_of_the_weights_counts(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "model.safetensors").write_bytes(bytes(9 * MIB))
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("size", [0, 1, 64 << 10, MIB])
def test_small_weight_files(folder: Path, size: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes(size))
    assert len(model_fingerprint(folder)) == 64


def test_the_name_of_a_weight_file_counts(folder: Path) -> None:
    before = model_fingerprint(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert model_fingerprint(folder) != before


def test_needs_no_torch() -> None:
    code = "import sys, speccache_rag.fingerprint; assert not {'torch', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestResolve:
    def test_a_local_folder_is_itself(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert resolve_model(str(folder)) == folder
        monkeypatch.chdir(folder.parent)
        assert resolve_model("model") == Path("model")

    @pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
    def test_a_missing_file_is_named(self, folder: Path, missing: str) -> None:
        (folder / missing).unlink()
        with pytest.raises(ConfigurationError, match=missing):
            resolve_model(str(folder))
        with pytest.raises(ConfigurationError, match=missing):
            model_fingerprint(folder)

    def test_a_file_is_no_folder(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="is a file"):
            resolve_model(str(folder / "model.safetensors"))

    @pytest.mark.parametrize("name", ["./absent", "~/absent-model", "/absent/model", "a/b/c"])
    def test_a_mistyped_path_is_not_searched_on_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
        with pytest.raises(ConfigurationError, match="does not exist"):
            resolve_model(name)

    def test_a_hub_id(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def snapshot(name: str, **_: Any) -> str:
            asked.append(name)
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert resolve_model("org/model") == folder
        assert asked == ["org/model"]

    @pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), HFValidationError("bad id"), OSError("404")])
    def test_a_hub_that_does_not_answer(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def snapshot(name: str, **_: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        with pytest.raises(ConfigurationError, match="'org/model' is no local folder.*Pass a local folder"):
            resolve_model("org/model")
