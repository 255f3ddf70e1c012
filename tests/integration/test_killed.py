"""A program killed while it warms leaves no process behind, and a store that the next one reads and completes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from speccache_rag import SpecCache
from speccache_rag.store.disk import DiskStore
from tests.conftest import tiny_engine_options
from tests.integration.processes import Script, shared_memory, survivors, wait_until

pytestmark = pytest.mark.vllm

TEXTS = [f"Page {i} of the log. " + f"On day {i * 7} the wind came from the north. " * 15 for i in range(60)]

WARM = f"""
import sys
from speccache_rag import SpecCache

def main(model, store):
    sc = SpecCache(model=model, store=store, policy="full_reuse", engine_options={tiny_engine_options()!r})
    sc.start()
    print("READY", flush=True)
    sc.warm({TEXTS!r}, show_progress=False)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Killed:
    """What a killed writer left."""

    store: Path
    survivors: list[psutil.Process]
    shared_memory: list[Path]
    n_stored: int
    """Chunks in the store after its last process had ended."""


@pytest.fixture(scope="module")
def killed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The store of a program that was killed when some of its chunks were there."""
    folder = tmp_path_factory.mktemp("killed")
    store = folder / "store"
    with Script(folder, WARM, tiny_folder, store) as script:
        script.expect("READY")
        children = script.children()
        memory = shared_memory(children)
        assert len(children) >= 2
        assert wait_until(lambda: _n_files(store) >= 10, seconds=60, pause=0.005)
        script.process.send_signal(signal.SIGKILL)
        assert script.process.wait() == -signal.SIGKILL
        left = survivors(children)
    # Nobody writes any more.
    n_stored = _n_files(store)
    time.sleep(0.5)
    assert n_stored == _n_files(store)
    return Killed(store, left, [path for path in memory if path.exists()], n_stored)


@pytest.fixture(scope="module")
def reopened(killed: Killed, tiny_folder: Path) -> Iterator[SpecCache]:
    """The next program on the same store."""
    with SpecCache(
        model=str(tiny_folder), store=str(killed.store), policy="full_reuse", engine_options=tiny_engine_options()
    ) as sc:
        yield sc


def test_no_process_and_no_shared_memory_survives(killed: Killed) -> None:
    assert killed.survivors == []
    assert killed.shared_memory == []


def test_the_store_holds_whole_chunks_and_nothing_worse_than_temporaries(killed: Killed) -> None:
    assert 10 <= killed.n_stored < len(TEXTS), "killed too early or too late to show anything"
    with DiskStore(killed.store) as store:
        problems = store.check()
        assert [p for p in problems if not p.endswith("unfinished write of a process that died")] == []
        store.check(fix=True)
        assert store.check() == []
        assert store.stats().chunks == killed.n_stored


def test_a_fresh_process_finds_the_chunks_without_warming(killed: Killed, reopened: SpecCache) -> None:
    """The index of known texts persists with the store."""
    prompt = [{"role": "user", "content": "Context:\n" + "\n".join(TEXTS[:3]) + "\n\nWhere did the wind come from?"}]
    answer = reopened.generate(prompt, max_tokens=2, ignore_eos=True)
    assert answer.report.chunks_matched == answer.report.chunks_reused == 3
    assert answer.report.loaded_tokens == answer.report.matched_tokens > 0
    assert answer.report.missed_tokens == 0
    known = reopened.stats()["known_chunks"]
    assert 3 <= known <= killed.n_stored, "the index never names a chunk that was not stored"


def test_warm_resumes(killed: Killed, reopened: SpecCache) -> None:
    report = reopened.warm(TEXTS, show_progress=False)
    assert report.n_texts == len(TEXTS)
    assert report.n_skipped == killed.n_stored
    assert report.n_captured == len(TEXTS) - killed.n_stored
    assert reopened.stats()["known_chunks"] == len(TEXTS)
    assert reopened.warm(TEXTS, show_progress=False).n_captured == 0
    last = [{"role": "user", "content": TEXTS[-1] + "\n" + TEXTS[0]}]
    assert reopened.generate(last, max_tokens=1).report.chunks_reused == 2


def _n_files(store: Path) -> int:
    return len(list(store.glob("kv/*/*/*.safetensors")))
