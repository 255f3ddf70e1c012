"""Python scripts in processes of their own, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0
"""Limit for the start of an engine, on the busiest machine."""
END_S = 60.0
"""Limit for the end of all processes; they need about 5 s on a quiet machine."""


class Script:
    """A running script. It talks by lines on standard output and waits for lines on standard input."""

    def __init__(self, folder: Path, code: str, *arguments: object) -> None:
        path = folder / "script.py"
        path.write_text(code)
        self._errors = folder / "stderr.txt"
        with self._errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(path), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # Signals that a terminal would send go to the whole group.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self._errors.read_text(errors="replace")

    def expect(self, line: str) -> None:
        """Read standard output up to `line`."""
        assert self.process.stdout is not None
        for found in self.process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"the script ended before it said {line!r}:\n{self.errors[-4000:]}")

    def proceed(self) -> None:
        """Let it go on behind its `input()`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def children(self) -> list[psutil.Process]:
        """Every process below it, but for Python's resource tracker, which ends after it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in below if "resource_tracker" not in " ".join(child.cmdline())]

    def end(self, seconds: float = END_S) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(timeout=seconds)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        """End it and everything below it, whatever the test found."""
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        for child in below:
            if child.is_running():
                child.kill()


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of shared memory that the processes map and that have a name."""
    mapped = {Path(entry.path) for process in processes for entry in process.memory_maps()}
    return {path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()}


def survivors(processes: Iterable[psutil.Process], seconds: float = END_S) -> list[psutil.Process]:
    """The processes that have not ended after `seconds`."""
    left = list(processes)

    def all_ended() -> bool:
        left[:] = [process for process in left if alive(process)]
        return not left

    wait_until(all_ended, seconds)
    return left


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Whether `condition` came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
