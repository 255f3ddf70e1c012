from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

from speccache_rag.plan.totals import Counters, Totals
from speccache_rag.types import PrefillReport

REPORT = PrefillReport(
    prompt_tokens=100,
    matched_tokens=80,
    cached_tokens=5,
    loaded_tokens=50,
    recomputed_tokens=12,
    missed_tokens=13,
    fresh_tokens=20,
    chunks_matched=4,
    chunks_reused=3,
)
SHARED = {field.name for field in fields(Totals)} - {"requests", "recaptured", "recapture_failures"}


def test_new_counters_are_zero() -> None:
    assert set(Counters().to_dict().values()) == {0}


def test_every_count_of_a_report_is_added() -> None:
    counters = Counters()
    counters.add_report(REPORT)
    counters.add_report(REPORT)
    totals = counters.to_dict()
    assert totals["requests"] == 2
    assert len(SHARED) == 9
    assert {name: totals[name] for name in SHARED} == {name: 2 * getattr(REPORT, name) for name in SHARED}


def test_sums_still_add_up_to_the_prompts() -> None:
    counters = Counters()
    for report in (
        REPORT,
        PrefillReport(prompt_tokens=7, fresh_tokens=7),
        PrefillReport(prompt_tokens=3, cached_tokens=3),
    ):
        counters.add_report(report)
    totals = counters.to_dict()
    parts = ("cached_tokens", "loaded_tokens", "recomputed_tokens", "missed_tokens", "fresh_tokens")
    assert sum(totals[name] for name in parts) == totals["prompt_tokens"] == 110


def test_recaptures_and_their_failures_are_apart() -> None:
    counters = Counters()
    for failed in (False, True, False):
        counters.add_recapture(failed=failed)
    totals = counters.to_dict()
    assert (totals["recaptured"], totals["recapture_failures"], totals["requests"]) == (2, 1, 0)


def test_threads_lose_no_count() -> None:
    counters = Counters()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: counters.add_report(REPORT), range(400)))
    assert counters.to_dict()["requests"] == 400
    assert counters.to_dict()["loaded_tokens"] == 400 * REPORT.loaded_tokens


def test_the_dict_is_a_snapshot() -> None:
    counters = Counters()
    before = counters.to_dict()
    counters.add_report(REPORT)
    assert before["requests"] == 0
