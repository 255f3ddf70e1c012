from __future__ import annotations

import threading

import pytest

from speccache_rag.engines.transformers.model_thread import ModelThread


def test_background_work_waits_for_everything_else() -> None:
    thread, go, done = ModelThread("test"), threading.Event(), list[str]()
    first = thread.submit(go.wait)
    later = [thread.submit(lambda n=n: done.append(f"slice {n}"), background=True) for n in range(3)]
    now = [thread.submit(lambda n=n: done.append(f"token {n}")) for n in range(3)]
    go.set()
    for future in (first, *later, *now):
        future.result(timeout=30)
    assert done == ["token 0", "token 1", "token 2", "slice 0", "slice 1", "slice 2"]
    thread.shutdown()


def test_an_error_is_the_callers_and_the_next_piece_is_done() -> None:
    thread = ModelThread("test")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result(timeout=30)
    assert thread.submit(lambda: 1).result(timeout=30) == 1
    thread.shutdown()
    with pytest.raises(RuntimeError):
        thread.submit(lambda: 1)


def test_what_was_cancelled_is_not_done() -> None:
    thread, go, done = ModelThread("test"), threading.Event(), list[int]()
    thread.submit(go.wait)
    cancelled = thread.submit(lambda: done.append(1))
    assert cancelled.cancel()
    go.set()
    thread.submit(lambda: done.append(2)).result(timeout=30)
    assert done == [2]
    thread.shutdown()
