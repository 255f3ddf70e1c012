"""Import rules between packages, and what `import speccache_rag` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import INTEGRATIONS, ROOT, python_files

LAZY = ["chromadb", "langchain_core", "llama_index", "transformers", "vllm"]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


SEEN_BY_INTEGRATIONS = {"runtime", "config", "spellings", "types", "errors", "prompt", "chunks"}


def test_integrations_see_the_runtime_and_what_its_values_are_made_of() -> None:
    seen = {
        name.split(".")[1]
        for file in python_files(INTEGRATIONS)
        for node in ast.walk(ast.parse(file.read_text()))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
        if name.startswith("speccache_rag.")
    }
    assert "runtime" in seen
    assert seen <= SEEN_BY_INTEGRATIONS


@pytest.mark.parametrize("statement", ["import speccache_rag", "from speccache_rag import SpecCacheConfig"])
def test_importing_the_package_loads_nothing_heavy(statement: str) -> None:
    program = f"{statement}\nimport sys\nprint(*sorted(set({LAZY}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
