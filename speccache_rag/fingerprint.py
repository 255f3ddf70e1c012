"""Where a model is, and a digest of what it is. Needs neither torch nor transformers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from speccache_rag.errors import ConfigurationError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A model folder must hold one of these."""
_DESCRIPTION_FILES = (
    "config.json",
    *_TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Small files that decide the KV, hashed whole. generation_config.json is left out: sampling leaves KV alone."""
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

_EDGE_BYTES = 1 << 20
_SAMPLE_BYTES = 64 << 10
_N_SAMPLES = 64


def model_fingerprint(path: Path) -> str:
    """64 hex digits that name the model in folder `path`: config, tokenizer and weights.

    The same in every process and at every place the folder is copied to. Editing the config, the tokenizer or any
    sampled byte of the weights changes it.

    Raises:
        ConfigurationError: `path` is not a model folder.
    """
    _check_model_folder(path)
    digest = hashlib.blake2b(digest_size=32)
    described = [path / name for name in _DESCRIPTION_FILES]
    for file in [f for f in described if f.is_file()] + sorted(path.glob("*.index.json")):
        _add(digest, file.name.encode())
        _add(digest, file.read_bytes())
    for file in sorted(f for pattern in _WEIGHT_PATTERNS for f in path.glob(pattern)):
        _add(digest, file.name.encode())
        _add(digest, str(file.stat().st_size).encode())
        for piece in _samples(file):
            _add(digest, piece)
    return digest.hexdigest()


def resolve_model(name: str) -> Path:
    """The folder of a model: `name` itself where it is a local folder, else the hub id `name`, fetched or from cache.

    Raises:
        ConfigurationError: the folder lacks a file (the message says which), or the hub id cannot be fetched.
    """
    local = Path(name).expanduser()
    if local.exists() or _looks_like_path(name):
        _check_model_folder(local)
        return local
    # Imported here: only hub ids need it, and it loads an HTTP client.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*", "consolidated*"])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Model {name!r} is no local folder and could not be fetched from the hub: {error}",
            hint="Pass a local folder that holds the model, or check the id and the connection.",
        ) from error
    _check_model_folder(Path(folder))
    return Path(folder)


def _looks_like_path(name: str) -> bool:
    """True for names that cannot be hub ids, so that a mistyped folder is not searched on the hub."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name


def _check_model_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigurationError(
            f"Model folder {str(path)!r} {'is a file' if path.is_file() else 'does not exist'}.",
            hint="Pass a folder with config.json, tokenizer and weights, or a hub id.",
        )
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"Model folder {str(path)!r} has no config.json.", hint="Pass the folder that holds config.json itself."
        )
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise ConfigurationError(
            f"Model folder {str(path)!r} has no tokenizer: {' or '.join(_TOKENIZER_FILES)} is missing.",
            hint="Save the tokenizer next to the weights: tokenizer.save_pretrained(folder).",
        )


def _samples(file: Path) -> Iterator[bytes]:
    """First and last MiB, and 64 evenly spaced 64 KiB samples of `file`.

    Not all of it: reading 15 GB takes as long as loading the model. A retrained or requantized model differs almost
    everywhere, so samples find it; the header in the first MiB holds names, shapes and dtypes.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        yield handle.read(_EDGE_BYTES)
        for i in range(_N_SAMPLES):
            handle.seek(i * max(0, size - _SAMPLE_BYTES) // (_N_SAMPLES - 1))
            yield handle.read(_SAMPLE_BYTES)
        handle.seek(max(0, size - _EDGE_BYTES))
        yield handle.read(_EDGE_BYTES)


def _add(digest: hashlib.blake2b, piece: bytes) -> None:
    """Length first, so that no two lists of pieces hash alike."""
    digest.update(len(piece).to_bytes(8, "little"))
    digest.update(piece)
