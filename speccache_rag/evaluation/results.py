"""Results: the records of one target model, looked at by contestant and example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speccache_rag.evaluation.records import FULL, Record
from speccache_rag.evaluation.statistics import Difference, paired_difference

REUSE = "full_reuse"
"""The contestant that recomputes nothing."""

MEASURES = ("f1", "em", "rouge_l", "needle")
"""Measures of an answer, each known for some data sets only."""

Measure = Callable[[Record], float | None]
Case = tuple[str, str]
"""Data set and example."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over all examples that have a record of it; means where nothing else is said."""

    label: str
    n: int
    computed: float
    """Tokens computed, scoring included, as a share of the prompt."""
    effective_ratio: float
    runs: float
    kl_mean: float
    kl_median: float
    agreement: float
    nll: float | None
    measures: dict[str, float]
    against_reuse: Difference | None
    """Its KL less that of recomputing nothing."""


class Results:
    """Records of one target, by contestant with its ratio (`Record.label`), in the order they were first seen."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.by_label: dict[str, dict[Case, Record]] = {}
        for record in records:
            self.by_label.setdefault(record.label, {})[record.dataset, record.example] = record

    @property
    def datasets(self) -> list[str]:
        """Names of the data sets, sorted."""
        return sorted({dataset for found in self.by_label.values() for dataset, _ in found})

    @property
    def families(self) -> dict[str, list[str]]:
        """Labels of each contestant by rising ratio; the two ends belong to none."""
        found: dict[str, dict[str, float]] = {}
        for label, records in self.by_label.items():
            one = next(iter(records.values()))
            if one.contestant not in (FULL, REUSE):
                found.setdefault(one.contestant, {})[label] = one.recompute_ratio
        return {name: sorted(labels, key=labels.__getitem__) for name, labels in found.items()}

    def of(self, dataset: str) -> Results:
        """The part of one data set."""
        return Results(r for found in self.by_label.values() for r in found.values() if r.dataset == dataset)

    def values(self, label: str, measure: Measure) -> dict[Case, float]:
        """A measure of one contestant, where it is known."""
        found = ((case, measure(record)) for case, record in self.by_label.get(label, {}).items())
        return {case: value for case, value in found if value is not None}

    def difference(self, first: str, second: str, measure: Measure) -> Difference | None:
        """Two contestants over the examples both have; None where there are none."""
        return paired(self.values(first, measure), self.values(second, measure))

    def rows(self) -> list[Row]:
        """One row for each contestant."""
        return [self._row(label, list(found.values())) for label, found in self.by_label.items()]

    def _row(self, label: str, records: Sequence[Record]) -> Row:
        kl = [record.kl for record in records]
        answers = {name: _mean(getattr(record, name) for record in records) for name in MEASURES}
        return Row(
            label=label,
            n=len(records),
            computed=float(np.mean([r.computed_tokens / r.prompt_tokens for r in records])),
            effective_ratio=float(np.mean([r.effective_ratio for r in records])),
            runs=float(np.mean([r.runs for r in records])),
            kl_mean=float(np.mean(kl)),
            kl_median=float(np.median(kl)),
            agreement=float(np.mean([r.agreement for r in records])),
            nll=_mean(r.nll for r in records),
            measures={name: value for name, value in answers.items() if value is not None},
            against_reuse=None if label in (FULL, REUSE) else self.difference(label, REUSE, kl_of),
        )


def kl_of(record: Record) -> float:
    """The measure that separates contestants best."""
    return record.kl


def paired(first: dict[Case, float], second: dict[Case, float]) -> Difference | None:
    """The difference over the cases that both have; None where there are none."""
    shared = [case for case in first if case in second]
    if not shared:
        return None
    return paired_difference([first[case] for case in shared], [second[case] for case in shared])


def by_target(records: Iterable[Record]) -> dict[str, Results]:
    """The results of each target model in a mixed list of records."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.target, []).append(record)
    return {target: Results(its) for target, its in found.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
