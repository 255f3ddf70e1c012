"""Who may import whom, and what `import speccache_rag` costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

LAZY = ["chromadb", "langchain_core", "llama_index", "transformers", "vllm"]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("statement", ["import speccache_rag", "from speccache_rag import SpecCacheConfig"])
def test_importing_the_package_loads_nothing_heavy(statement: str) -> None:
    program = f"{statement}\nimport sys\nprint(*sorted(set({LAZY}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
