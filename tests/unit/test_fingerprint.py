from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from speccache_rag import fingerprint
from speccache_rag.errors import ConfigurationError
from speccache_rag.fingerprint import config_changes, file_digest, model_fingerprint, resolve_model

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with 8 MiB of weights."""
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
        "modeling_custom.py",
    ],
)
def test_files_that_decide_kv_count(folder: Path, name: str) -> None:
    before = model_fingerprint(folder)
    (folder / name).write_text('{"changed": true}')
    assert model_fingerprint(folder) != before


@pytest.mark.parametrize("at", [0, MIB - 1, 3 * MIB + 12345, 8 * MIB - 1])
def test_any_changed_byte_of_the_weights_counts(folder: Path, at: int) -> None:
    before = model_fingerprint(folder)
    with (folder / "model.safetensors").open("r+b") as weights:
        weights.seek(at)
        weights.write(b"\x01")
    assert model_fingerprint(folder) != before


class TestFileDigest:
    @pytest.fixture
    def reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Files that were read to be hashed. What is remembered is remembered below `tmp_path`."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        hashed, reads = hashlib.file_digest, []

        def counted(opened: Any, name: str) -> Any:
            reads.append(opened.name)
            return hashed(opened, name)

        monkeypatch.setattr(hashlib, "file_digest", counted)
        return reads

    @pytest.fixture
    def weights(self, folder: Path) -> Path:
        """A weight file that was last changed a while ago."""
        file = folder / "model.safetensors"
        os.utime(file, (1, 1))
        return file

    def test_a_file_is_read_once(
        self, weights: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fingerprint, "_STILL_S", 0.0)
        assert file_digest(weights) == file_digest(weights) == hashlib.sha256(bytes(8 * MIB)).hexdigest()
        assert len(reads) == 1
        (note,) = (tmp_path / "cache" / "speccache" / "file_hashes").iterdir()
        note.write_text("garbage")
        file_digest(weights)
        assert len(reads) == 2

    def test_a_file_that_just_changed_is_not_remembered(self, weights: Path, reads: list[str]) -> None:
        for byte in (b"\x01", b"\x02"):
            before = file_digest(weights)
            with weights.open("r+b") as opened:
                opened.write(byte)
            os.utime(weights, (1, 1))  # its time of change does not give it away
            assert file_digest(weights) != before

    def test_the_name_of_a_file_in_the_hubs_cache_is_its_hash(self, tmp_path: Path, reads: list[str]) -> None:
        blob = tmp_path / "blobs" / ("ab" * 32)
        blob.parent.mkdir()
        blob.write_bytes(b"weights")
        (tmp_path / "model.safetensors").symlink_to(blob)
        assert file_digest(tmp_path / "model.safetensors") == "ab" * 32
        assert reads == []

    def test_a_cache_that_cannot_be_written_costs_time_only(
        self, weights: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fingerprint, "_STILL_S", 0.0)
        (tmp_path / "cache").write_text("a file where the folder should be")
        assert file_digest(weights) == file_digest(weights)
        assert len(reads) == 2


SAVED = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 0.5},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"sliding_window": 128},
        {"rms_norm_eps": None},
    ],
)
def test_an_override_of_the_config_counts(change: dict[str, Any]) -> None:
    assert config_changes({**SAVED, **change}, SAVED) not in ("", config_changes({**SAVED, "other": 1}, SAVED))


def test_what_says_nothing_of_kv_is_no_change() -> None:
    assert config_changes({**SAVED, "_name_or_path": "/elsewhere", "dtype": "float32"}, SAVED) == ""
    assert config_changes({**SAVED, "rope_parameters": dict(reversed(SAVED["rope_parameters"].items()))}, SAVED) == ""


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
