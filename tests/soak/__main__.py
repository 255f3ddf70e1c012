"""The soak as a command: `make soak`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import typer
from tqdm import tqdm

from tests.conftest import NO_NETWORK


def main(requests: int = 1000, seed: int = 0) -> None:
    """Run it, print what happened, and fail where an answer was wrong."""
    os.environ.update(NO_NETWORK)
    # The soak looks into vLLM's worker process with functions of its own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from tests.soak.soak import soak
    from tests.tiny import tiny_model

    with tempfile.TemporaryDirectory() as folder, tqdm(total=requests, unit="request") as bar:
        model = tiny_model(Path(folder) / "model")
        report = soak(model, Path(folder) / "store", requests, seed, lambda: bar.update())
    typer.echo(report)
    raise typer.Exit(1 if report.wrong else 0)


if __name__ == "__main__":
    typer.run(main)
