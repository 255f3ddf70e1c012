"""Fill the running virtual environment with the locked CPU set-up and this package, editable.

    .venv/bin/python scripts/install_cpu.py

torch comes first and alone, because its builds differ in kind and not in version: plain pip finds the CPU build on
some machines and a CUDA build of several gigabytes on others. There it is taken from PyTorch's own CPU index.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


PIP_INSTALL = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]


def install(*arguments: str) -> None:
    """`pip install --no-deps`; pip's own message and exit status end the script where it fails."""
    if status := subprocess.run([*PIP_INSTALL, *arguments]).returncode:
        sys.exit(status)


def torch_index() -> list[str]:
    """pip options that make `torch` a CPU build: none where plain pip would take one anyway."""
    if platform.system() != "Linux":
        return []  # the only builds there are
    probe = [*PIP_INSTALL, "--dry-run", "--ignore-installed", "--report", "-", TORCH]
    found = subprocess.run(probe, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    builds = json.loads(found.stdout)["install"] if found.returncode == 0 else []
    plain_pip_takes_cpu = any(build["metadata"]["version"].endswith("+cpu") for build in builds)
    return [] if plain_pip_takes_cpu else ["--index-url", TORCH_CPU_INDEX]


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("This is not a virtual environment. Run `make`, or `python3 -m venv .venv` and its python.")
    print(f"Installing {TORCH} (CPU build)", flush=True)
    install(*torch_index(), TORCH)
    print("Installing requirements/cpu.lock; the first time takes some minutes", flush=True)
    install("--requirement", str(ROOT / "requirements" / "cpu.lock"))
    print("Installing speccache-rag, editable", flush=True)
    install("--editable", str(ROOT))


if __name__ == "__main__":
    main()
