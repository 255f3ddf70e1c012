"""Where the demo's default models are."""

from __future__ import annotations

import os
from pathlib import Path

TARGET = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
SPECULATIVE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def local_or_hub(hub_id: str) -> str:
    """The folder of a model, in `$SPECCACHE_MODELS` or `.models` of the current directory; else its hub id."""
    name = hub_id.rpartition("/")[2]
    roots = filter(None, (os.environ.get("SPECCACHE_MODELS"), ".models"))
    folders = (Path(root).expanduser() / name for root in roots)
    return next((str(folder.absolute()) for folder in folders if (folder / "config.json").is_file()), hub_id)
