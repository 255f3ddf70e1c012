"""Positional recovery: moving cached keys to their place in this prompt (paper section 2.5; a RoPE rotation)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """One layer's rotation angles.

    `cos` and `sin` are float32 [P, R/2] for position differences 0 .. P - 1, pure rotations: a scale some RoPE kinds
    multiply in (YaRN's mscale) is in the cached keys already and is stripped here.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    neox: bool
    """True: halves of the head are paired (NeoX, Llama); False: neighbours are (GPT-J)."""

    @classmethod
    def from_cache(cls, cos_sin: torch.Tensor, *, neox: bool) -> RopeTable:
        """From a [P, R] table whose rows are cosines then sines, as vLLM keeps it."""
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        # Row 0 is cos(0) times the scale, so it is the scale.
        scale = cos[0, 0]
        return cls(cos / scale, sin / scale, neox)

    @property
    def limit(self) -> int:
        """Largest position difference, exclusive."""
        return int(self.cos.shape[0])

    def move(self, keys: torch.Tensor, delta: int | torch.Tensor) -> torch.Tensor:
        """Keys [..., T, H, D] moved by `delta` positions, either way; computed in float32, returned in their dtype.

        `delta` is one number for all tokens, or int64 [T], one for each.

        Raises:
            IndexError: |delta| is beyond the table.
        """
        if isinstance(delta, int):
            cos, sin = self.cos[abs(delta)], self.sin[abs(delta)]  # [R/2]
            sin = -sin if delta < 0 else sin
        else:
            cos, sin = self.cos[delta.abs(), None], self.sin[delta.abs(), None]  # [T, 1, R/2]: the same for all heads
            sin = torch.where(delta[:, None, None] < 0, -sin, sin)
        half = cos.shape[-1]
        x = keys.float()
        rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.neox:
            a, b = rotary[..., :half], rotary[..., half:]
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1).to(keys.dtype)
