"""The demo's parts, and the whole demo on a scripted runtime with an embedding that knows nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llama_index.core import MockEmbedding
from llama_index.core.schema import MetadataMode
from typer.testing import CliRunner

from speccache_rag.cli.app import app
from speccache_rag.cli.demo import command, corpus, index
from speccache_rag.cli.demo.corpus import Readme, installed_readmes, ordered, without_noise
from speccache_rag.cli.demo.models import local_or_hub
from speccache_rag.cli.demo.questions import QUESTIONS
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError
from speccache_rag.runtime import SpecCache
from tests.tiny import tiny_tokenizer
from tests.unit.fake_runtime import FakeRuntime

RECORD = {
    "question",
    "answer_full",
    "answer_reuse",
    "prompt_tokens",
    "ttft_full_s",
    "ttft_reuse_s",
    "report",
}


def readme(package: str, n_words: int = 300) -> Readme:
    return Readme(package, "1.0", " ".join(f"{package}{i}." for i in range(n_words)))


# Corpus.


def test_noise_goes_and_text_stays() -> None:
    text = (
        '<p align="center">\n  <img src="logo.svg" alt="logo">\n</p>\n\n\n'
        "[![build](https://b.svg)](https://b) ![shot](a.png)\n"
        ".. image:: https://badge.svg\n   :target: https://x\n   :alt: badge\n"
        "<!-- a\ncomment -->\nReal **text** with `List<int>`, a < b > c and <Response [200]>.\n"
    )
    assert without_noise(text) == "Real **text** with `List<int>`, a < b > c and <Response [200]>."


def test_installed_readmes_are_sorted_and_within_limits() -> None:
    readmes = installed_readmes()
    assert readmes == installed_readmes()
    assert [r.package for r in readmes] == sorted({r.package for r in readmes})
    assert all(corpus.MIN_CHARS <= len(r.text) <= corpus.MAX_CHARS for r in readmes)
    assert {question.package for question in QUESTIONS} <= {r.package for r in readmes}


def test_packages_asked_about_come_first() -> None:
    readmes = [readme("a"), readme("b"), readme("c")]
    assert [r.package for r in ordered(readmes, ["c", "b", "c"])] == ["c", "b", "a"]
    with pytest.raises(ConfigurationError, match="without a README here: z"):
        ordered(readmes, ["z"])


# Chunks and index.


def test_chunks_are_bounded_verbatim_and_named_by_content() -> None:
    readmes = [readme("first"), readme("second")]
    chunks = index.readme_chunks(readmes, str.split, max_chunks=7, chunk_tokens=64)
    texts = [chunk.get_content(metadata_mode=MetadataMode.NONE) for chunk in chunks]
    assert len(chunks) == 7
    assert all(0.3 * 64 <= len(text.split()) <= 64 for text in texts)
    assert all(any(text in r.text for r in readmes) for text in texts)
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert chunks[0].get_content(metadata_mode=mode) == f"package: first 1.0\n\n{texts[0]}"
    again = index.readme_chunks(readmes, str.split, max_chunks=7, chunk_tokens=64)
    assert [c.node_id for c in again] == [c.node_id for c in chunks]


class CountingEmbedding(MockEmbedding):
    embedded: list[str] = []

    def _get_text_embedding(self, text: str) -> list[float]:
        self.embedded.append(text)
        return super()._get_text_embedding(text)


def test_the_index_holds_exactly_the_corpus_and_embeds_only_what_is_new(tmp_path: Path) -> None:
    embedding = CountingEmbedding(embed_dim=8, embedded=[])
    old = index.readme_chunks([readme("kept"), readme("gone")], str.split, max_chunks=50, chunk_tokens=100)
    new = index.readme_chunks([readme("kept"), readme("came")], str.split, max_chunks=50, chunk_tokens=100)
    index.open_index(tmp_path, old, embedding)
    assert len(embedding.embedded) == len(old)
    reopened = index.open_index(tmp_path, new, embedding)
    assert len(embedding.embedded) == len(old) + sum("came" in c.get_content() for c in new)
    found = reopened.as_retriever(similarity_top_k=50).retrieve("anything")
    assert {node.node_id for node in found} == {chunk.node_id for chunk in new}


# The whole.


def test_models_are_found_locally_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECCACHE_MODELS", raising=False)
    assert local_or_hub("org/name") == "org/name"
    for root in (".models", "elsewhere"):
        (tmp_path / root / "name").mkdir(parents=True)
        (tmp_path / root / "name" / "config.json").touch()
    assert local_or_hub("org/name") == str(tmp_path / ".models" / "name")
    monkeypatch.setenv("SPECCACHE_MODELS", str(tmp_path / "elsewhere"))
    assert local_or_hub("org/name") == str(tmp_path / "elsewhere" / "name")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime(tokenizer=tiny_tokenizer(tmp_path / "tokenizer"))

    def at(config: SpecCacheConfig) -> FakeRuntime:
        fake.config = config
        return fake

    monkeypatch.setattr(SpecCache, "from_config", at, raising=False)
    monkeypatch.setattr(SpecCache, "shared", at)
    monkeypatch.setattr(corpus, "installed_readmes", lambda: [readme(q.package, 60) for q in QUESTIONS])
    monkeypatch.setattr(index, "offline_embedding", lambda: MockEmbedding(embed_dim=8))
    return fake


def test_the_demo_asks_each_question_twice_and_writes_the_record(runtime: FakeRuntime, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    arguments = ["demo", "--questions", "3", "--store", str(tmp_path / "store"), "--chunk-tokens", "64"]
    models = ["--target", "big", "--speculative", "small", "--engine-option", "max_model_len=2048"]
    result = CliRunner().invoke(app, [*arguments, *models, "--json", str(file)])
    assert result.exit_code == 0, result.output + repr(result.exception)

    written = json.loads(file.read_text())
    assert set(written) == {"questions", "online", "median_speedup", "models", "versions"}
    assert [set(record) for record in (*written["questions"], written["online"])] == [RECORD] * 4
    assert [record["question"] for record in written["questions"]] == [q.text for q in QUESTIONS[:3]]
    assert written["median_speedup"] == pytest.approx(3.0)
    assert written["models"] == {"target": "big", "speculative": "small"}
    assert written["online"]["report"]["scoring"] == "online"
    assert "Median speed-up of the time to first token: 3.0x" in result.stdout

    config = runtime.config
    assert config.engine_options == {"max_model_len": 2048, "max_num_batched_tokens": 8192, "enforce_eager": True}
    assert config.store == str(tmp_path / "store" / "chunks")
    assert runtime.warmed
    assert runtime.closed


def test_both_runs_of_a_question_see_one_prompt_cold_behind_the_anchor(runtime: FakeRuntime, tmp_path: Path) -> None:
    arguments = ["demo", "--ask", "Why?", "--store", str(tmp_path), "--target", "m", "--top-k", "3"]
    result = CliRunner().invoke(app, [*arguments, "--chunk-tokens", "64"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert runtime.resets == len(runtime.calls)
    (full, full_params), (reuse, reuse_params) = runtime.calls[3:5]  # after three untimed runs
    assert full == reuse
    assert (full_params["policy"], reuse_params.get("policy")) == ("full_recompute", None)
    template = runtime.tokenizer.apply_chat_template
    rendered = template(reuse, tokenize=False, add_generation_prompt=True)
    assert runtime.config.anchor
    assert rendered.startswith(f"{runtime.config.anchor}package: ")
    assert sum(chunk in rendered for chunk in runtime.warmed) == 3


def test_missing_packages_are_named_with_the_pip_line(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NEEDED", ("json", "no_such_package"))
    result = CliRunner().invoke(app, ["demo"])
    assert isinstance(result.exception, ConfigurationError)
    assert "not installed: no_such_package. Install them with: pip install" in str(result.exception)
