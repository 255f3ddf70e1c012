"""A policy from another package, written from CONTRIBUTING alone, works in both engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccache_rag import SpecCache
from speccache_rag.selection import POLICIES
from tests.parity.engines import CHUNKS, ask, assert_same, prompt_of

POLICY = '''
from dataclasses import dataclass

import numpy as np

from speccache_rag.selection.base import SelectionPolicy


@dataclass(frozen=True)
class Edges(SelectionPolicy):
    """The tokens nearest to either end of their chunk."""

    first: bool = True

    def choose(self, prompt, budget, answers):
        distance = np.concatenate(
            [np.minimum(np.arange(p.length), np.arange(p.length)[::-1]) for p in prompt.placements]
        )
        order = np.argsort(distance if self.first else -distance, kind="stable")
        return prompt.chunk_positions()[order[:budget]]
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's package, as pip would leave it."""
    (tmp_path / "edges_policy.py").write_text(POLICY)
    info = tmp_path / "edges_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: edges-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[speccache_rag.policies]\nedges = edges_policy:Edges\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("engine", ["tsc", pytest.param("sc", marks=pytest.mark.vllm)])
@pytest.mark.usefixtures("installed")
def test_it_is_found_and_keeps_the_laws(engine: str, request: pytest.FixtureRequest) -> None:
    running: SpecCache = request.getfixturevalue(engine)
    running.warm(CHUNKS, show_progress=False)
    assert "edges" in POLICIES.names()
    prompt = prompt_of(CHUNKS)
    exact = ask(running, prompt, policy="edges", recompute_ratio=1.0)
    assert_same(exact, ask(running, prompt, policy="full_recompute"))
    report = ask(running, prompt, policy="edges", recompute_ratio=0.1).report
    assert report.policy == "edges"
    assert 0 < report.recomputed_tokens < 0.2 * report.matched_tokens
