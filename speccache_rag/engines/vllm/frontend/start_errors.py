"""Errors of an engine that does not start: refused at once where the cause is known, else with vLLM's own cause.

vLLM logs in one of its processes why it does not start, and tells the process above no more than that. `record` brings
the cause back: vLLM calls it in each of its processes, as the entry point `speccache` of `vllm.general_plugins`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.utils.system_utils import get_mp_context

from speccache_rag.errors import EngineStartError

VARIABLE = "SPECCACHE_START_ERRORS"
"""Names the file of causes to vLLM's processes, while an engine starts."""

_starting = threading.Lock()  # the environment is the process's: one start at a time

_MEMORY = "Free memory, or lower what engine_options asks for: gpu_memory_utilization, kv_cache_memory_bytes."
_REMEDIES = {
    r"KV cache is needed|No available memory for the cache blocks": "Lower max_model_len in engine_options, or give "
    "the KV cache more: kv_cache_memory_bytes, on GPU gpu_memory_utilization, on CPU VLLM_CPU_KVCACHE_SPACE (GiB).",
    r"(?i)out of ?memory|cannot allocate memory|free memory on device|memory utilization|available memory": _MEMORY,
    r"Failed core proc.*: -9\b": f"A process was killed, as the system does where memory runs out. {_MEMORY}",
}
"""By what a cause says; the first that fits."""


def check_process() -> None:
    """Refuse a process in which vLLM cannot start its own.

    Raises:
        EngineStartError: the main script is being imported by one of vLLM's processes, or could not be; or the process
            is a daemon of `multiprocessing`, which may have no children.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise EngineStartError(
            "The engine is being started by an import of the main script, in a process that vLLM itself started.",
            hint='Put the script\'s code under: if __name__ == "__main__":',
        )
    if process.daemon:
        raise EngineStartError(
            f"{process.name} is a daemon process, as those of multiprocessing.Pool are; it may not start vLLM's.",
            hint="Start the engine in the main process, use concurrent.futures.ProcessPoolExecutor with "
            'mp_context=multiprocessing.get_context("spawn"), or take engine="transformers".',
        )
    script = getattr(sys.modules["__main__"], "__file__", None)
    method = get_mp_context().get_start_method()  # type: ignore[no-untyped-call]
    if script is not None and not os.path.exists(script) and method == "spawn":
        raise EngineStartError(
            f"vLLM's processes import the main script, and there is no file {script!r}.",
            hint="Save a program that is read from standard input as a file, or pass it with python -c.",
        )


@contextmanager
def explained() -> Iterator[None]:
    """The time in which vLLM starts its processes.

    Raises:
        EngineStartError: it did not; the message holds the cause that its processes logged first.
    """
    with _starting, tempfile.NamedTemporaryFile(prefix="speccache-start-", suffix=".txt") as causes:
        os.environ[VARIABLE] = causes.name
        try:
            yield
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            raise _explanation(str(error), Path(causes.name).read_text(errors="replace")) from error
        finally:
            del os.environ[VARIABLE]


def _explanation(told: str, logged: str) -> EngineStartError:
    """The error for what vLLM told us, and the causes its processes logged, one a line, the root first."""
    cause = logged.splitlines()[0] if logged else told
    remedies = (remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, cause))
    # What vLLM proposes are its own options by the names of one platform.
    return EngineStartError(
        f"vLLM did not start: {cause.partition(' Try increasing')[0]}", hint=next(remedies, "" if logged else _LOOK)
    )


_LOOK = "vLLM printed the cause above."


def record() -> None:
    """Note the errors that vLLM logs in this process, if it belongs to an engine that is being started."""
    if path := os.environ.get(VARIABLE):
        logging.getLogger("vllm").addHandler(_Recorder(Path(path)))


class _Recorder(logging.Handler):
    """Appends logged exceptions to a file, one line each, as long as the file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        line = " ".join(f"{type(error).__name__}: {error}".split())
        try:
            # Not created: the file is gone once the engine has started.
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError:
            return
        with os.fdopen(file, "w") as causes:
            causes.write(f"{line}\n")
