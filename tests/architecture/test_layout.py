"""Where files are, how long they get, and which words they use."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest

from tests.architecture.sources import CORE, INTEGRATIONS, ROOT, defined_names, functions, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VLLM_WORD = re.compile(r"(^|_)(block|segment)s?(_|$)|(Block|Segment)s?([A-Z_]|$)")


@pytest.mark.parametrize("folder", ["llama_index", "llama_index/llms", "llama_index/retrievers"])
def test_namespace_folders_stay_namespaces(folder: str) -> None:
    # An __init__.py here would shadow the package of the same name that llama-index-core installs.
    assert (INTEGRATIONS / "llama_index").is_dir()
    assert not (INTEGRATIONS / folder / "__init__.py").exists()


def test_files_are_short() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in python_files(CORE, INTEGRATIONS)}
    assert {str(file): lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = [(file, *function) for file in python_files(CORE, INTEGRATIONS) for function in functions(file.read_text())]
    assert [f"{file}:{name} {lines}" for file, name, lines in found if lines > MAX_FUNCTION_LINES] == []


def test_blocks_are_named_only_where_vllm_is() -> None:
    # The glossary: a retrieved passage is a chunk; a block is vLLM's page of KV.
    elsewhere = [file for file in python_files(CORE) if CORE / "engines" / "vllm" not in file.parents]
    names = {f"{file}:{name}" for file in elsewhere for name in defined_names(file.read_text())}
    assert [name for name in sorted(names) if VLLM_WORD.search(name.rpartition(":")[2])] == []


@pytest.mark.parametrize("name", ["block", "block_ids", "n_blocks", "TextBlock", "BlockTable", "segment_start"])
def test_the_word_check_sees(name: str) -> None:
    assert VLLM_WORD.search(name)
    assert name in defined_names(f"def f({name}): ...")
    assert name in defined_names(f"self.{name} = 1")


@pytest.mark.parametrize("name", ["non_blocking", "unblock", "Blocked"])
def test_the_word_check_spares(name: str) -> None:
    assert not VLLM_WORD.search(name)


def test_changelog_starts_with_this_version() -> None:
    top = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] == version("speccache-rag")


def test_notebooks_are_stripped() -> None:
    notebooks = sorted((ROOT / "cookbook").glob("*.ipynb"))
    assert [notebook.name[:2] for notebook in notebooks] == ["01", "02", "03", "04", "05", "06"]
    for notebook in notebooks:
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, notebook.name
