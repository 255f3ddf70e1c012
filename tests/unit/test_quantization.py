from __future__ import annotations

import pytest
import safetensors.torch
import torch

from speccache_rag.config import KvDtype
from speccache_rag.store import codec
from speccache_rag.store.base import Namespace
from speccache_rag.store.quantization import QUANTIZED, quantize, restore
from speccache_rag.types import ChunkKV
from tests.contract.store_contract import key_of, make_kv

KINDS: list[KvDtype] = ["fp8", "int8"]


def kv_of_many_sizes() -> ChunkKV:
    """Heads whose values differ by orders of magnitude, as keys of real models do; one of zeros."""
    kv = make_kv(400, torch.bfloat16)
    for head, size in enumerate([0.02, 300.0]):
        kv.keys[:, :, head] *= size
    kv.values[1, :, 0] = 0
    return kv


@pytest.mark.parametrize("kind", KINDS)
def test_each_head_of_each_layer_keeps_its_own_scale(kind: KvDtype) -> None:
    kv = kv_of_many_sizes()
    for exact in (kv.keys, kv.values):
        again = restore(quantize(exact, kind), torch.float32)
        largest = exact.float().abs().amax(dim=(1, 3), keepdim=True)
        error = (again - exact.float()).abs()
        # fp8 e4m3 has 3 bits behind the point; int8 has steps of a 127th of the largest value.
        bound = exact.float().abs() / 16 + largest / 448 if kind == "fp8" else largest / 254 * 1.001
        assert bool((error <= bound + 1e-12).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_takes_half_the_bytes_and_is_verified(kind: KvDtype) -> None:
    kv = kv_of_many_sizes()
    plain, small = codec.encode(key_of(kv), kv), codec.encode(key_of(kv), kv, kv_dtype=kind)
    assert len(small) < 0.55 * len(plain)
    back = codec.decode(small, key_of(kv))
    assert (back.keys.dtype, back.token_ids, back.position) == (kv.keys.dtype, kv.token_ids, kv.position)
    torch.testing.assert_close(back.keys, restore(quantize(kv.keys, kind), torch.bfloat16), atol=0, rtol=0)
    tensors = safetensors.torch.load(small)
    assert tensors["keys"].dtype == QUANTIZED[kind].torch_dtype
    for at in range(0, len(small), 997):
        damaged = bytearray(small)
        damaged[at] ^= 4
        with pytest.raises(codec.ChunkCorrupted):
            codec.decode(damaged, key_of(kv))


def test_what_was_rounded_has_a_key_of_its_own() -> None:
    kinds: list[KvDtype] = ["auto", "fp8", "int8"]
    assert len({Namespace("m", "bfloat16", "{}", (), kv_dtype=kind).key([1, 2]) for kind in kinds}) == 3
