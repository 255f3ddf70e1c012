"""One chunk's KV as the bytes of a safetensors file, verified down to the last bit.

Any safetensors reader opens the file. It is written here and not by the safetensors package because its JSON header
must be reproducible: what the checksum covers is the header and the tensors together.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch

from speccache_rag.errors import ChunkCorrupted
from speccache_rag.store.base import FORMAT_VERSION
from speccache_rag.types import ChunkKey, ChunkKV

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(key: ChunkKey, kv: ChunkKV) -> bytes:
    """The file of a chunk: tensors "keys" and "values" [L, T, H, D], the other facts in the header.

    Raises:
        ValueError: no tokens, or a dtype other than bfloat16, float16 and float32.
    """
    if kv.n_tokens == 0:
        raise ValueError("a chunk without tokens has no KV to store")
    if kv.keys.dtype not in _NAMES or kv.values.dtype != kv.keys.dtype:
        raise ValueError(f"keys are {kv.keys.dtype}, values {kv.values.dtype}; both must be one of {list(_NAMES)}")
    tensors = [_bytes(kv.keys), _bytes(kv.values)]
    facts = (key, _NAMES[kv.keys.dtype], tuple(kv.keys.shape), kv.token_ids, kv.position)
    header = _header(*facts, checksum=_checksum(_header(*facts, checksum=""), *tensors))
    return b"".join([len(header).to_bytes(8, "little"), header, *tensors])


def decode(data: bytes | bytearray, key: ChunkKey) -> ChunkKV:
    """The KV of chunk `key`. Its tensors view `data` where that is a bytearray, else a copy.

    Raises:
        ChunkCorrupted: the bytes are not exactly what `encode` wrote for this key.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        header = bytes(data[8 : 8 + size])
        parsed = json.loads(header)
        dtype, shape = parsed["keys"]["dtype"], tuple(parsed["keys"]["shape"])
        token_ids, position, checksum = _read_metadata(parsed["__metadata__"])
        facts = (key, dtype, shape, token_ids, position)
        same_header = header == _header(*facts, checksum=checksum)
        body = memoryview(data)[8 + size :]
        half = _nbytes(dtype, shape)
        if not same_header or len(body) != 2 * half:
            raise ValueError("its header does not fit its key, its format version or its size")
        if checksum != _checksum(_header(*facts, checksum=""), body):
            raise ValueError("its checksum differs")
        buffer = data if isinstance(data, bytearray) else bytearray(data)
        keys, values = (
            torch.frombuffer(buffer, dtype=_DTYPES[dtype], offset=8 + size + at, count=math.prod(shape)).view(shape)
            for at in (0, half)
        )
        return ChunkKV(keys, values, token_ids, position)
    # Damaged bytes can trip the parsing anywhere; whatever they trip is the same finding.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as error:
        raise ChunkCorrupted(f"Stored chunk {key} ({len(data)} bytes) does not verify: {error}.") from error


def _header(
    key: ChunkKey, dtype: str, shape: tuple[int, ...], token_ids: tuple[int, ...], position: int, *, checksum: str
) -> bytes:
    """The one JSON header these facts have, padded to 8 bytes so that the tensors are aligned."""
    half = _nbytes(dtype, shape)
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "key": key,
        "token_ids": ",".join(map(str, token_ids)),
        "position": str(position),
        "checksum": checksum,
    }
    tensors = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [start, start + half]}
        for name, start in (("keys", 0), ("values", half))
    }
    header = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)


def _read_metadata(metadata: dict[str, Any]) -> tuple[tuple[int, ...], int, str]:
    return tuple(map(int, metadata["token_ids"].split(","))), int(metadata["position"]), metadata["checksum"]


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _DTYPES[dtype].itemsize * math.prod(shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(*parts: bytes | memoryview) -> str:
    # Not CRC-32: one damaged read in 2^32 that passes would change answers without a trace. SHA-256 and not blake2b,
    # because processors have instructions for it: about 1 ms per MB, measured three times as quick.
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()
