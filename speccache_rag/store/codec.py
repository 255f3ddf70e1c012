"""One chunk's KV as the bytes of a safetensors file, verified down to the last bit.

Any safetensors reader opens the file. It is written here and not by the safetensors package because its JSON header
must be reproducible: what the checksum covers is the header and the tensors together.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from speccache_rag.config import KvDtype
from speccache_rag.errors import ChunkCorrupted
from speccache_rag.store.base import FORMAT_VERSION
from speccache_rag.store.quantization import QUANTIZED, Quantized, quantize, restore
from speccache_rag.types import ChunkKey, ChunkKV

LARGEST_CHUNK = 8 << 30
"""Bytes of a file; 64 MiB is usual for 512 tokens of a model of 8 billion parameters."""

_LARGEST_HEADER = 16 << 20
"""A million tokens need half of it."""

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_STORED = {**_DTYPES, **{q.safetensors_name: q.torch_dtype for q in QUANTIZED.values()}}
_NAMES = {dtype: name for name, dtype in _STORED.items()}


@dataclass(frozen=True, slots=True)
class _Facts:
    """All that a header says but the checksum."""

    key: ChunkKey
    dtype: str
    """Of the KV, a name of safetensors."""
    stored: str
    """Of the stored keys and values: the same, or that of a quantized kind."""
    shape: tuple[int, ...]
    token_ids: tuple[int, ...]
    position: int

    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor, in the order of the file."""
        tensors = [("keys", self.stored, self.shape), ("values", self.stored, self.shape)]
        if self.stored != self.dtype:
            scales = self.shape[0], 1, self.shape[2], 1
            tensors += [("key_scales", "F32", scales), ("value_scales", "F32", scales)]
        return tensors

    def nbytes(self) -> int:
        return sum(_nbytes(dtype, shape) for _, dtype, shape in self.layout())

    def header(self, checksum: str) -> bytes:
        """The one JSON header these facts have, padded to 8 bytes so that the tensors are aligned."""
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "key": self.key,
            "dtype": self.dtype,
            "token_ids": ",".join(map(str, self.token_ids)),
            "position": str(self.position),
            "checksum": checksum,
        }
        described: dict[str, Any] = {"__metadata__": metadata}
        start = 0
        for name, dtype, shape in self.layout():
            end = start + _nbytes(dtype, shape)
            described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(described, separators=(",", ":")).encode()
        return text + b" " * (-len(text) % 8)


def encode(key: ChunkKey, kv: ChunkKV, secret: bytes | None = None, kv_dtype: KvDtype = "auto") -> bytes:
    """The file of a chunk: tensors "keys" and "values" [L, T, H, D], the other facts in the header.

    Args:
        key: the chunk.
        kv: its KV.
        secret: what the checksum is keyed with.
        kv_dtype: "auto" keeps every bit; see store.quantization for the others.

    Raises:
        ValueError: no tokens, a value that is not finite, or a dtype other than bfloat16, float16 and float32.
    """
    if kv.n_tokens == 0:
        raise ValueError("a chunk without tokens has no KV to store")
    if kv.keys.dtype not in _DTYPES.values() or kv.values.dtype != kv.keys.dtype:
        raise ValueError(f"keys are {kv.keys.dtype}, values {kv.values.dtype}; both must be one of {list(_DTYPES)}")
    if not _finite(kv.keys, kv.values):
        raise ValueError("the model computed KV that is not finite")
    if kv_dtype == "auto":
        tensors = [kv.keys, kv.values]
    else:
        keys, values = quantize(kv.keys, kv_dtype), quantize(kv.values, kv_dtype)
        tensors = [keys.numbers, values.numbers, keys.scales, values.scales]
    facts = _Facts(
        key, _NAMES[kv.keys.dtype], _NAMES[tensors[0].dtype], tuple(kv.keys.shape), kv.token_ids, kv.position
    )
    parts = [_bytes(tensor) for tensor in tensors]
    header = facts.header(_checksum(secret, facts.header(""), *parts))
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def expected_size(read: Callable[[int], bytes], key: ChunkKey) -> int:
    """Bytes of the whole file, as its header says; no more than the header is read.

    Args:
        read: gives the next n bytes of the file.
        key: the chunk the file is kept under.

    Raises:
        ChunkCorrupted: the header is not one that `encode` writes for this key.
    """
    size = int.from_bytes(read(8), "little")
    if size > _LARGEST_HEADER:
        raise ChunkCorrupted(f"Stored chunk {key} says that its header has {size} bytes.")
    facts, _ = _read_header(read(size), key)
    return 8 + size + facts.nbytes()


def decode(data: bytes | bytearray, key: ChunkKey, secret: bytes | None = None) -> ChunkKV:
    """The KV of chunk `key`. Its tensors view `data` where that is a bytearray and nothing is quantized.

    Raises:
        ChunkCorrupted: the bytes are not exactly what `encode` wrote for this key, with this secret.
    """
    size = int.from_bytes(data[:8], "little")
    facts, checksum = _read_header(bytes(data[8 : 8 + size]), key)
    body = memoryview(data)[8 + size :]
    if len(body) != facts.nbytes():
        raise ChunkCorrupted(f"Stored chunk {key} has {len(body)} bytes of KV instead of {facts.nbytes()}.")
    if not hmac.compare_digest(checksum.encode(), _checksum(secret, facts.header(""), body).encode()):
        raise ChunkCorrupted(f"Stored chunk {key} ({len(data)} bytes) does not verify: its checksum differs.")
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    tensors = _tensors(buffer, 8 + size, facts)
    if facts.stored == facts.dtype:
        keys, values = tensors
    else:
        numbers, scales, dtype = tensors[:2], tensors[2:], _DTYPES[facts.dtype]
        keys, values = (restore(Quantized(n, s), dtype) for n, s in zip(numbers, scales, strict=True))
    if not _finite(keys, values):
        raise ChunkCorrupted(f"Stored chunk {key} holds a value that is not finite.")
    return ChunkKV(keys, values, facts.token_ids, facts.position)


def _read_header(header: bytes, key: ChunkKey) -> tuple[_Facts, str]:
    """The facts and the checksum.

    Raises:
        ChunkCorrupted: `encode` does not write such a header for this key.
    """
    try:
        parsed = json.loads(header)
        metadata = parsed["__metadata__"]
        facts = _Facts(
            key,
            metadata["dtype"],
            parsed["keys"]["dtype"],
            tuple(parsed["keys"]["shape"]),
            tuple(map(int, metadata["token_ids"].split(","))),
            int(metadata["position"]),
        )
        checksum = metadata["checksum"]
        n_layers, n_tokens, n_heads, head_dim = facts.shape
        sound = facts.dtype in _DTYPES and n_tokens == len(facts.token_ids) and min(facts.shape) > 0
        if not sound or header != facts.header(checksum):
            raise ValueError("it does not fit its key, its format version or its size")
        return facts, checksum
    # Damaged bytes can trip the parsing anywhere; whatever they trip is the same finding.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ChunkCorrupted(f"The header of stored chunk {key} does not verify: {error}.") from error


def _tensors(buffer: bytearray, at: int, facts: _Facts) -> list[torch.Tensor]:
    tensors = []
    for _, dtype, shape in facts.layout():
        flat = torch.frombuffer(buffer, dtype=_STORED[dtype], offset=at, count=math.prod(shape))
        tensors.append(flat.view(shape))
        at += _nbytes(dtype, shape)
    return tensors


def _finite(*tensors: torch.Tensor) -> bool:
    # The extremes of a tensor with a NaN in it are NaN. One pass, no second tensor.
    return all(math.isfinite(extreme.item()) for tensor in tensors for extreme in torch.aminmax(tensor))


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _STORED[dtype].itemsize * math.prod(shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(secret: bytes | None, *parts: bytes | memoryview) -> str:
    # Not CRC-32: one damaged read in 2^32 that passes would change answers without a trace. SHA-256 and not blake2b,
    # because processors have instructions for it: about 1 ms per MB, measured three times as quick.
    state = hashlib.sha256() if secret is None else hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        state.update(part)
    return state.hexdigest()
