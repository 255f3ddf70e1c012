"""The process that starts an engine decides when vLLM's processes end, and they end when it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Protocol


class _Parent(Protocol):
    def join(self) -> None: ...


def ignore_interrupts() -> None:
    """In a process of vLLM's, leave Ctrl-C to the process above.

    Terminals and notebooks send it to the whole process group. vLLM's processes would end in the middle of a step,
    and the interrupt of one answer would cost the engine.
    """
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_parent() -> None:
    """In vLLM's engine process, watch the process above from now on.

    vLLM's workers watch the engine process, but nothing watches the process above it: killed by a signal it cannot
    handle, it would leave the engine, its workers and their shared memory behind for good. (Before vLLM makes its
    connectors, its own handshake with that process gives up after five minutes.)
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), name="speccache-lifeline", daemon=True).start()


def _follow(parent: _Parent) -> None:
    parent.join()
    # vLLM's own handler aborts what runs, ends the workers and frees the shared memory.
    os.kill(os.getpid(), signal.SIGTERM)
