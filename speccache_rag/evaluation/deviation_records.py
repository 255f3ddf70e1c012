"""Records of a deviation study: how far stored KV is from a full prefill's, by layer and by offset in the chunk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from speccache_rag.errors import ConfigurationError

DEVIATIONS = "deviation.jsonl"
"""The file of a study in a results folder."""

OFFSETS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 1 << 30))
"""Half-open ranges of a token's place in its chunk."""


@dataclass(frozen=True, slots=True)
class DeviationRecord:
    """Squared deviations of one example's approximate chunk tokens in one layer."""

    example: str
    dataset: str
    target: str
    of: str
    """"key" or "value"."""
    layer: int
    mean: float
    by_offset: tuple[float | None, ...]
    """Mean in each of `OFFSETS`; None where no token is."""


def write(folder: Path, records: Iterable[DeviationRecord]) -> None:
    """Append records to a folder's file."""
    with (folder / DEVIATIONS).open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def read(folder: Path) -> Iterator[DeviationRecord]:
    """The records of a folder; none where there is no file.

    Raises:
        ConfigurationError: a line is no record.
    """
    path = folder / DEVIATIONS
    if not path.exists():
        return
    known = {field.name for field in fields(DeviationRecord)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            value = {name: entry for name, entry in json.loads(line).items() if name in known}
            yield DeviationRecord(**{**value, "by_offset": tuple(value["by_offset"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"Line {number} of {str(path)!r} is no record: {error}.", hint="") from error
