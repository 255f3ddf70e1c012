from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_rag.errors import ChunkCorrupted
from speccache_rag.store import base, codec
from speccache_rag.store.base import Namespace
from speccache_rag.types import ChunkKey, ChunkKV
from tests.conftest import ROOT
from tests.contract.store_contract import assert_same, key_of, make_kv

KV = make_kv(3, torch.bfloat16)
KEY = key_of(KV)
DATA = codec.encode(KEY, KV)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_safetensors_reads_what_we_write(dtype: torch.dtype) -> None:
    kv = make_kv(17, dtype)
    tensors = safetensors.torch.load(codec.encode(key_of(kv), kv))
    assert set(tensors) == {"keys", "values"}
    assert_same(ChunkKV(tensors["keys"], tensors["values"], kv.token_ids, kv.position), kv)


def test_the_header_says_what_is_stored() -> None:
    size = int.from_bytes(DATA[:8], "little")
    metadata = json.loads(DATA[8 : 8 + size])["__metadata__"]
    assert metadata["key"] == KEY
    assert metadata["token_ids"] == "0,1,2"
    assert metadata["position"] == "7"


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_decode_gives_back_what_was_encoded(kind: type[bytes]) -> None:
    assert_same(codec.decode(kind(DATA), KEY), KV)


def test_a_bytearray_is_not_copied() -> None:
    data = bytearray(DATA)
    codec.decode(data, KEY).values.zero_()
    assert not any(data[-KV.values.nbytes :])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found(at: int, change: int) -> None:
    data = bytearray(DATA)
    data[at] ^= change
    with pytest.raises(ChunkCorrupted, match=KEY):
        codec.decode(data, KEY)


def test_one_flipped_bit_is_found_in_every_header_byte() -> None:
    for at in range(len(DATA) - 2 * KV.keys.nbytes):
        for bit in range(8):
            data = bytearray(DATA)
            data[at] ^= 1 << bit
            with pytest.raises(ChunkCorrupted):
                codec.decode(data, KEY)


def test_every_truncation_is_found() -> None:
    for size in range(len(DATA)):
        with pytest.raises(ChunkCorrupted):
            codec.decode(DATA[:size], KEY)


@pytest.mark.parametrize("data", [b"", DATA + b"\0", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\0" * 8])
def test_other_bytes_are_found(data: bytes) -> None:
    with pytest.raises(ChunkCorrupted):
        codec.decode(data, KEY)


def test_another_key_is_found() -> None:
    with pytest.raises(ChunkCorrupted):
        codec.decode(DATA, ChunkKey("0" * 64))


def test_another_format_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FORMAT_VERSION", base.FORMAT_VERSION + 1)
    with pytest.raises(ChunkCorrupted):
        codec.decode(DATA, KEY)


def test_unknown_dtypes_are_refused() -> None:
    kv = make_kv(3, torch.float64)
    with pytest.raises(ValueError, match=r"torch.float64.*BF16"):
        codec.encode(KEY, kv)


def test_a_secret_keys_the_checksum() -> None:
    data = codec.encode(KEY, KV, b"ours")
    assert_same(codec.decode(data, KEY, b"ours"), KV)
    for other in (None, b"theirs"):
        with pytest.raises(ChunkCorrupted, match="checksum"):
            codec.decode(data, KEY, other)
        with pytest.raises(ChunkCorrupted, match="checksum"):
            codec.decode(codec.encode(KEY, KV, other), KEY, b"ours")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_neither_written_nor_read(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(3, torch.bfloat16)
    kv.values[1, 2, 0, 1] = value
    with pytest.raises(ValueError, match="not finite"):
        codec.encode(KEY, kv)
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_finite", lambda *tensors: True)
        planted = codec.encode(KEY, kv)
    with pytest.raises(ChunkCorrupted, match="not finite"):
        codec.decode(planted, KEY)


def test_the_expected_size_is_read_from_the_header_alone() -> None:
    for kv_dtype in ("auto", "fp8", "int8"):
        data = codec.encode(KEY, KV, kv_dtype=kv_dtype)
        size = int.from_bytes(data[:8], "little")
        assert codec.expected_size(io.BytesIO(data[: 8 + size]).read, KEY) == len(data)


@pytest.mark.parametrize("start", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (17 << 20).to_bytes(8, "little")])
def test_a_header_that_lies_about_its_size_is_not_read(start: bytes) -> None:
    asked = []

    def read(n: int) -> bytes:
        asked.append(n)
        return start[:n] if len(asked) == 1 else b"{}"

    with pytest.raises(ChunkCorrupted):
        codec.expected_size(read, KEY)
    assert max(asked) <= 8


@pytest.mark.parametrize(
    "shape", [[3, 3, 2, -4], [-3, 3, -2, 4], [3, 4, 2, 4], [3, 3, 8], [0, 3, 2, 4], ["3", 3, 2, 4]]
)
def test_shapes_that_no_chunk_has_are_found(shape: list[int]) -> None:
    size = int.from_bytes(DATA[:8], "little")
    header = json.loads(DATA[8 : 8 + size])
    header["keys"]["shape"] = header["values"]["shape"] = shape
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(ChunkCorrupted):
        codec.decode(len(text).to_bytes(8, "little") + text + DATA[8 + size :], KEY)


FIELDS = {"fingerprint": "model", "dtype": "bfloat16", "rope": "{}", "anchor_ids": (1, 2, 3), "tenant": "ours"}


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "model2"},
        {"dtype": "float32"},
        {"rope": '{"factor":2}'},
        {"anchor_ids": (1, 2)},
        {"anchor_ids": ()},
        {"tenant": None},
        {"tenant": ""},
        {"tenant": "theirs"},
        {"fingerprint": "modelb", "dtype": "float16"},  # the same text when joined
    ],
    ids=str,
)
def test_every_fact_makes_another_namespace(change: dict[str, object]) -> None:
    ours, other = Namespace(**FIELDS), Namespace(**{**FIELDS, **change})  # type: ignore[arg-type]
    assert ours.digest != other.digest
    assert ours.key([1, 2]) != other.key([1, 2])


def test_no_tenant_and_an_empty_one_differ() -> None:
    assert Namespace("m", "d", "r", (), None).digest != Namespace("m", "d", "r", (), "").digest


def test_the_format_version_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Namespace("m", "d", "r", ()).key([1])
    monkeypatch.setattr(base, "FORMAT_VERSION", base.FORMAT_VERSION + 1)
    assert Namespace("m", "d", "r", ()).key([1]) != before


def test_token_ids_make_the_key() -> None:
    namespace = Namespace("m", "d", "r", ())
    keys = {namespace.key(ids) for ids in [(), (0,), (0, 0), (1,), (256,), (1, 2), (2, 1), (12,)]}
    assert len(keys) == 8
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from speccache_rag.store.base import Namespace;"
        "print(Namespace('m', 'bfloat16', '{}', (1, 2), 'tenant').key((5, 6, 70000)))"
    )
    environment = {"PYTHONHASHSEED": "4242"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # Pinned: a change here orphans every stored chunk and must come with a new FORMAT_VERSION.
    assert result.stdout.strip() == "98958b052525bd879180c8cb75ad492665ac6bae850708437dae88d3cfa61e05"
