from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.base import ReuseOutcome
from tests.soak.soak import Answer, faults_of, soak

RIGHT = Answer((7, 8), ({7: -0.1, 9: -3.0}, {8: -0.7, 5: -0.7005}))


@pytest.mark.vllm
@pytest.mark.slow
def test_mixed_requests_in_one_engine_equal_fresh_engines(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short form of `make soak`."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    report = soak(tiny_folder, tmp_path / "store", n_requests=60, seed=1)
    assert report.wrong == []
    assert report.requests == 60
    assert set(report.kinds) == {"reuse", "holes", "plain", "ratio one", "question"}
    assert report.cancelled > 0 and report.missed_chunks > 0 and report.cached_tokens > 0


def test_what_counts_as_wrong() -> None:
    assert faults_of(RIGHT, RIGHT) == []
    assert faults_of(replace(RIGHT, token_ids=(7, 5)), RIGHT) == [], "a tie"
    assert faults_of(replace(RIGHT, token_ids=(9, 8)), RIGHT) == ["token 0 is 9 instead of 7"]
    assert faults_of(replace(RIGHT, token_ids=(7,)), RIGHT) == ["1 tokens instead of 2"]
    apart = replace(RIGHT, logprobs=({7: -0.2, 9: -3.0}, RIGHT.logprobs[1]))
    assert faults_of(apart, RIGHT) == ["logprobs of token 0 are 0.1000 apart"]
    assert faults_of(replace(RIGHT, outcome=ReuseOutcome(fault="it broke")), RIGHT) == ["fault: it broke"]
    answer = Answer(values=np.array([0.0, np.nan, 1.0]))
    assert faults_of(answer, answer) == []
    assert faults_of(Answer(values=np.array([0.0, np.nan, 1.1])), answer) == ["another answer to the question"]
