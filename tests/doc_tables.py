"""Tables in docs/ that tests make: what a page claims is what a run measured.

A page holds `<!-- table:NAME -->` and `<!-- end:NAME -->`; the lines between them are the table. A test compares it
with what was measured; `pytest --update-docs` writes it instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def check_table(
    page: str, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, update: bool
) -> None:
    """Compare a page's table with these rows, or write it.

    Raises:
        AssertionError: the page says something else.
    """
    lines = [columns, ["---"] * len(columns), *rows]
    table = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- table:{re.escape(name)} -->\n).*?(\n?<!-- end:{re.escape(name)} -->)", re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"docs/{page} holds no place for table {name!r}"
    if update:
        path.write_text(pattern.sub(lambda m: f"{m[1]}{table}\n<!-- end:{name} -->", text), encoding="utf-8")
        return
    assert f"<!-- table:{name} -->\n{table}\n<!-- end:{name} -->" in text, (
        f"docs/{page} is not what was measured. Run this test with --update-docs.\n{table}"
    )
