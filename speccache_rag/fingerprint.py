"""The folder of a model, and a digest of what it is. Needs neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from speccache_rag.errors import ConfigurationError

logger = logging.getLogger(__name__)

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
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_READERS = 4
_STILL_S = 2.0
"""A file changed less than this long ago may change again within the same tick of its filesystem's clock."""

_PLACES = ("_name_or_path", "name_or_path", "transformers_version")
_HOW_IT_RUNS = ("dtype", "torch_dtype", "_attn_implementation", "_attn_implementation_internal", "attn_implementation")
_NO_FACTS = frozenset(_PLACES + _HOW_IT_RUNS)
"""Entries of a config that say where it came from, or what is a fact of its own (dtype), or leaves KV alone."""


def model_fingerprint(path: Path) -> str:
    """64 hex digits that name the model in folder `path`: config, tokenizer, weights and, where it has some, code.

    The same in every process and at every place the folder is copied to. Any changed byte changes it. Weight files
    are read whole the first time (about a second for each GB), unless they come from the hub's cache, which names
    them by their hashes; after that their hashes are remembered while inode, size and times stay as they were.

    Raises:
        ConfigurationError: `path` is not a model folder.
    """
    _check_model_folder(path)
    digest = hashlib.blake2b(digest_size=32)
    described = [path / name for name in _DESCRIPTION_FILES]
    code = sorted(path.glob("*.py"))
    for file in [f for f in described if f.is_file()] + sorted(path.glob("*.index.json")) + code:
        _add(digest, file.name.encode())
        _add(digest, file.read_bytes())
    weights = sorted(f for pattern in _WEIGHT_PATTERNS for f in path.glob(pattern))
    with ThreadPoolExecutor(_READERS, thread_name_prefix="speccache-hash") as pool:
        for file, content in zip(weights, pool.map(file_digest, weights), strict=True):
            _add(digest, file.name.encode())
            _add(digest, content.encode())
    return digest.hexdigest()


def config_changes(effective: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """What an engine runs instead of what the model's folder says: canonical JSON, empty where nothing differs.

    Args:
        effective: the config of the running model, after overrides, as a dict.
        saved: the same of the folder's own config.json.
    """
    names = (effective.keys() | saved.keys()) - _NO_FACTS
    changed = {
        name: effective.get(name) for name in names if _canonical(effective.get(name)) != _canonical(saved.get(name))
    }
    return _canonical(changed) if changed else ""


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def file_digest(file: Path) -> str:
    """SHA-256 of a file's content, 64 hex digits: as the hub's cache names it, as remembered, or computed now."""
    target = file.resolve()
    if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return target.name
    stat = target.stat()
    facts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    note = _remembered() / hashlib.sha256(repr((str(target), *facts)).encode()).hexdigest()
    with suppress(OSError):
        if _SHA256.fullmatch(known := note.read_text().strip()):
            return known
    logger.info("hashing %s (%.1f GB), once", file, stat.st_size / 1e9)
    with target.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if time.time() - max(stat.st_mtime, stat.st_ctime) > _STILL_S:
        with suppress(OSError):  # it is computed again the next time
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}")
            temporary.write_text(found)
            temporary.replace(note)
    return found


def _remembered() -> Path:
    """The folder with a file for each hashed file, named by what must not change."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "speccache" / "file_hashes"


def resolve_model(name: str, *, revision: str | None = None) -> Path:
    """The folder of a model: `name` itself where it is a local folder, else the hub id `name`, fetched or from cache.

    Args:
        name: a folder or a hub id.
        revision: of the hub id; a folder has none.

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
        ignored = ["*/*", "consolidated*"]
        folder = snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=ignored)
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


def _add(digest: hashlib.blake2b, piece: bytes) -> None:
    """Length first, so that no two lists of pieces hash alike."""
    digest.update(len(piece).to_bytes(8, "little"))
    digest.update(piece)
