"""The files the architecture tests look at, and what they read off them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "speccache_rag"
INTEGRATIONS = ROOT / "integrations"


def python_files(*folders: Path) -> list[Path]:
    """Every Python file in the folders; none at all means that the tests look at the wrong place."""
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    assert files, f"no Python files in {folders}"
    return files


def functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function and method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def defined_names(source: str) -> set[str]:
    """Names that the source itself chooses: of functions, classes, parameters, variables and attributes."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names
