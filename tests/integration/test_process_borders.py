"""Every way to leave a process for another one: an answer, or at once an error that says what to do; at exit too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.processes import ROOT

LIMIT_S = 30.0
"""For what a child does and for its end, without what it imports. Idle cores need a third of it."""

CHILDREN = f"""
import concurrent.futures, json, multiprocessing, os, sys, time, traceback

from speccache_rag import SpecCache

OPTIONS = dict(model=sys.argv[1], store=sys.argv[2], engine="transformers", policy="full_reuse")
LIMIT_S = {LIMIT_S}

def ask(sc):
    try:
        return "answered %d" % sc.generate("The mill of Arden", max_tokens=2, ignore_eos=True).usage.completion_tokens
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)

def ask_anew(_=None):
    with SpecCache(**OPTIONS) as sc:
        return ask(sc)

def in_fork(work):
    '''What `work` returns in a forked process that then ends as programs do.'''
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(work()).encode())
        sys.exit(0)
    os.close(writer)
    end = time.monotonic() + LIMIT_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            return "hangs"
        time.sleep(0.05)
    return json.loads(os.read(reader, 1 << 16) or '"ended without a word"')

def in_process(context, work):
    '''The same in a process of multiprocessing, daemon or not.'''
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()), daemon=True)
    process.start()
    found = receiver.recv() if receiver.poll(LIMIT_S) else "hangs"
    process.join(LIMIT_S)
    return found if process.exitcode == 0 else "does not end"
"""

AFTER = (
    CHILDREN
    + """
def main():
    sc = SpecCache(**OPTIONS)
    sc.warm(["The mill of Arden was built in 1892 by masons from the north."], show_progress=False)
    fork = multiprocessing.get_context("fork")
    found = {
        "generate": in_fork(lambda: ask(sc)),
        "nothing": in_fork(lambda: "ended"),
        "close": in_fork(lambda: sc.close() or "closed"),
        "stats": in_fork(lambda: sorted(sc.stats())[0]),
        "new": in_fork(ask_anew),
        "grandchild": in_fork(lambda: in_fork(ask_anew)),
        "daemon": in_process(fork, lambda: ask(sc)),
    }
    with fork.Pool(1) as pool:
        found["pool"] = pool.apply_async(ask_anew).get(LIMIT_S)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
        found["executor"] = pool.submit(ask_anew).result(LIMIT_S)
    stream = sc.stream("The mill of Arden", max_tokens=5, ignore_eos=True)
    next(stream)
    found["stream"] = in_fork(lambda: ask_stream(stream))
    found["parent"] = ask(sc)
    print(json.dumps(found))

def ask_stream(stream):
    try:
        return "got %d pieces" % len(list(stream))
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)

if __name__ == "__main__":
    main()
"""
)

BEFORE = (
    CHILDREN
    + """
def main():
    sc = SpecCache(**OPTIONS)  # made, and not started
    sc.tokenizer
    found = {"generate": in_fork(lambda: ask(sc)), "new": in_fork(ask_anew), "nothing": in_fork(lambda: "ended")}
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found[method] = pool.apply_async(ask, [sc]).get(120)
    found["parent"] = ask(sc)
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""
)

EXEC = (
    CHILDREN
    + """
if __name__ == "__main__":
    sc = SpecCache(**OPTIONS).start()
    os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])
"""
)

STDIN = CHILDREN + "\nprint(ask_anew())\n"


def run(code: str, *arguments: object, on_stdin: bool = False, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, "-" if on_stdin else str(script), *map(str, arguments)],
        input=code if on_stdin else None,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
    return ended.stdout.strip()


def test_a_fork_of_a_process_with_an_engine(tiny_folder: Path, tmp_path: Path) -> None:
    found = json.loads(run(AFTER, tiny_folder, tmp_path / "store", folder=tmp_path))
    told = {"generate", "new", "stream", "grandchild", "daemon", "pool", "executor"}
    for way in told:
        assert found[way].startswith("EngineForked: "), (way, found[way])
        assert "its fork. Start engines behind the fork: gunicorn without --preload" in found[way]
    assert {way: text for way, text in found.items() if way not in told} == {
        "nothing": "ended",
        "close": "closed",
        "stats": found["stats"],
        "parent": "answered 2",
    }


def test_a_fork_before_the_engine_starts_and_fresh_processes_answer(tiny_folder: Path, tmp_path: Path) -> None:
    found = json.loads(run(BEFORE, tiny_folder, tmp_path / "store", folder=tmp_path))
    ways = ("generate", "new", "spawn", "forkserver", "parent")
    assert found == {**dict.fromkeys(ways, "answered 2"), "nothing": "ended"}


def test_exec_leaves_nothing_to_wait_for(tiny_folder: Path, tmp_path: Path) -> None:
    assert run(EXEC, tiny_folder, tmp_path / "store", folder=tmp_path) == "another program"


def test_a_script_on_standard_input_answers_where_no_process_is_spawned(tiny_folder: Path, tmp_path: Path) -> None:
    assert run(STDIN, tiny_folder, tmp_path / "store", on_stdin=True, folder=tmp_path) == "answered 2"
