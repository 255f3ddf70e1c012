"""Keys and values in 8 bits: half the bytes of bfloat16, with one scale for each layer and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from speccache_rag.config import KvDtype


@dataclass(frozen=True, slots=True)
class Kind:
    """A number of 8 bits."""

    torch_dtype: torch.dtype
    safetensors_name: str
    largest: float


QUANTIZED: dict[KvDtype, Kind] = {
    "fp8": Kind(torch.float8_e4m3fn, "F8_E4M3", 448.0),
    "int8": Kind(torch.int8, "I8", 127.0),
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """Numbers [L, T, H, D] to be multiplied by float32 scales [L, 1, H, 1]."""

    numbers: torch.Tensor
    scales: torch.Tensor


def quantize(tensor: torch.Tensor, kv_dtype: KvDtype) -> Quantized:
    """The nearest 8-bit numbers of a tensor [L, T, H, D]; the largest value of a layer's head is kept exactly."""
    kind = QUANTIZED[kv_dtype]
    exact = tensor.float()
    # A head of zeros needs any scale but zero.
    scales = (exact.abs().amax(dim=(1, 3), keepdim=True) / kind.largest).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = exact / scales
    if not kind.torch_dtype.is_floating_point:
        numbers = numbers.round()
    return Quantized(numbers.to(kind.torch_dtype), scales)


def restore(quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The tensor [L, T, H, D] in `dtype`."""
    return (quantized.numbers.float() * quantized.scales).to(dtype)
