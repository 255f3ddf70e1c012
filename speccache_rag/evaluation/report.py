"""What an evaluation found: one row a contestant, and the file that keeps every record."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.evaluation.runner import Record


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over all its examples; means where nothing else is said."""

    contestant: str
    n: int
    f1: float
    kl_mean: float
    kl_median: float
    agreement: float
    effective_ratio: float


def summarize(records: Sequence[Record]) -> list[Row]:
    """One row a contestant, in the order of their first records."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.contestant, []).append(record)
    return [_row(name, of_one) for name, of_one in by_name.items()]


def _row(name: str, records: Sequence[Record]) -> Row:
    kl = [record.kl for record in records]
    return Row(
        contestant=name,
        n=len(records),
        f1=float(np.mean([record.f1 for record in records])),
        kl_mean=float(np.mean(kl)),
        kl_median=float(np.median(kl)),
        agreement=float(np.mean([record.agreement for record in records])),
        effective_ratio=float(np.mean([record.effective_ratio for record in records])),
    )


class ResultFile:
    """Settings, summary and records of one evaluation as JSON, rewritten whole after every example.

    Args:
        path: the file; None keeps nothing.
        settings: what the figures depend on. Records in the file are taken up where these are the same.

    Raises:
        ConfigurationError: the file holds something else, or results of other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self.records = self._kept()

    @property
    def done(self) -> set[str]:
        """Examples that have their records."""
        return {record.example for record in self.records}

    def add(self, records: Sequence[Record]) -> None:
        """Keep one example's records; an interrupted write leaves the file as it was."""
        self.records += records
        if self._path is None:
            return
        value = {
            "settings": self._settings,
            "summary": [asdict(row) for row in summarize(self.records)],
            "records": [record.to_dict() for record in self.records],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self._path)

    def _kept(self) -> list[Record]:
        if self._path is None or not self._path.exists():
            return []
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
            settings, records = value["settings"], [Record(**record) for record in value["records"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused("holds no results of an evaluation") from error
        if settings != self._settings:
            raise self._refused("holds results of other settings")
        return records

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{str(self._path)!r} {why}.", hint="Name another file, or remove this one.")
