"""However a program ends, no process and no shared memory stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import tiny_engine_options
from tests.integration.processes import START_S, Script, shared_memory, survivors, wait_until

pytestmark = pytest.mark.vllm

GUARDED = f"""
import signal
import sys
from speccache_rag import SpecCache

def main(model, store, ending):
    # Whoever runs the tests as a background job passes SIGINT on ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sc = SpecCache(model=model, store=store, policy="full_reuse", engine_options={tiny_engine_options()!r})
    sc.warm(["The mill of Arden was built in 1892 by masons from the north."], show_progress=False)
    print("READY", flush=True)
    input()
    if ending == "close":
        sc.close()
        print("CLOSED", flush=True)
        input()
    if ending == "raise":
        raise RuntimeError("a mistake of the user")
    if ending == "interrupt":
        try:
            sc.warm([f"Chunk {{i}} says that stone {{i * i}} lies there." for i in range(3000)], show_progress=False)
        except KeyboardInterrupt:
            sc.generate("The engine is still there.", max_tokens=1)
            print("ANSWERED", flush=True)
            raise

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

UNGUARDED = f"""
import sys
from speccache_rag import SpecCache
sc = SpecCache(model=sys.argv[1], policy="full_reuse", engine_options={tiny_engine_options()!r})
sc.start()
"""


def test_close_ends_every_process_and_frees_shared_memory(tiny_folder: Path, tmp_path: Path) -> None:
    with Script(tmp_path, GUARDED, tiny_folder, tmp_path / "store", "close") as script:
        script.expect("READY")
        children = script.children()
        memory = shared_memory(children)
        assert len(children) >= 2, "an engine process and a worker"
        assert memory, "vLLM's processes talk through shared memory"
        script.proceed()
        script.expect("CLOSED")
        assert survivors(children, seconds=1) == [], "close() returns when all have ended"
        assert [path for path in memory if path.exists()] == []
        script.proceed()
        assert script.end() == 0
        _assert_no_complaint(script)
        said = [line for line in script.errors.splitlines() if line.strip()]
        assert len(said) <= 5, "a start, a request and an end say next to nothing"


@pytest.mark.parametrize(("ending", "status", "last_word"), [("return", 0, ""), ("raise", 1, "a mistake of the user")])
def test_a_program_that_never_calls_close_ends_cleanly(
    tiny_folder: Path, tmp_path: Path, ending: str, status: int, last_word: str
) -> None:
    with Script(tmp_path, GUARDED, tiny_folder, tmp_path / "store", ending) as script:
        script.expect("READY")
        children = script.children()
        memory = shared_memory(children)
        script.proceed()
        assert script.end() == status
        assert last_word in script.errors
        assert survivors(children) == []
        assert [path for path in memory if path.exists()] == []
        _assert_no_complaint(script)


def test_ctrl_c_during_warm_ends_everything_and_keeps_what_was_stored(tiny_folder: Path, tmp_path: Path) -> None:
    from speccache_rag.store.disk import DiskStore

    store = tmp_path / "store"
    with Script(tmp_path, GUARDED, tiny_folder, store, "interrupt") as script:
        script.expect("READY")
        children = script.children()
        memory = shared_memory(children)
        script.proceed()
        assert wait_until(lambda: len(list(store.glob("kv/*/*/*.safetensors"))) > 20, seconds=60)
        os.killpg(script.process.pid, signal.SIGINT)
        script.expect("ANSWERED")  # a notebook goes on with the same engine
        assert script.end() == -signal.SIGINT
        assert "KeyboardInterrupt" in script.errors
        assert survivors(children) == []
        assert [path for path in memory if path.exists()] == []
        _assert_no_complaint(script)
    with DiskStore(store) as disk:
        assert 20 < disk.stats().chunks < 3000
        assert disk.check() == []


def test_a_script_without_main_guard_is_told_so(tiny_folder: Path, tmp_path: Path) -> None:
    """vLLM's process imports the script again, which would start an engine in an engine."""
    with Script(tmp_path, UNGUARDED, tiny_folder) as script:
        assert script.end(START_S) != 0
        assert 'Put the script\'s code under: if __name__ == "__main__":' in script.errors
        assert "speccache_rag.errors.EngineStartError" in script.errors.strip().splitlines()[-1]
        _assert_no_complaint(script)


def _assert_no_complaint(script: Script) -> None:
    for complaint in (
        "leaked",
        "deprecated",
        "never retrieved",
        "was never awaited",
        "Task was destroyed",
        "force killing",
    ):
        assert complaint not in script.errors
