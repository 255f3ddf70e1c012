"""`Counters`: sums over all that a `SpecCache` did since it was made."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, fields

from speccache_rag.types import PrefillReport


@dataclass(slots=True)
class Totals:
    """Sums over finished prefills, and background captures."""

    requests: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    fresh_tokens: int = 0
    chunks_matched: int = 0
    chunks_reused: int = 0
    recaptured: int = 0
    """Missed chunks captured again in the background."""
    recapture_failures: int = 0


class Counters:
    """Thread-safe totals."""

    def __init__(self) -> None:
        self._totals = Totals()
        self._lock = threading.Lock()

    def add_report(self, report: PrefillReport) -> None:
        """Count a finished prefill."""
        shared = {field.name for field in fields(Totals)} & {field.name for field in fields(PrefillReport)}
        with self._lock:
            self._totals.requests += 1
            for name in shared:
                setattr(self._totals, name, getattr(self._totals, name) + getattr(report, name))

    def add_recapture(self, failed: bool) -> None:
        """Count a background capture."""
        with self._lock:
            self._totals.recaptured += not failed
            self._totals.recapture_failures += failed

    def to_dict(self) -> dict[str, int]:
        """The totals now."""
        with self._lock:
            return asdict(self._totals)
