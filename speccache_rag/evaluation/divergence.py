"""Distance between the distributions of two prefills along one answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over the answer's tokens."""

    kl: float
    """KL(reference || other) in nats."""
    agreement: float
    """Share of tokens where both have the same top token."""


def divergence(reference: torch.Tensor, other: torch.Tensor) -> Divergence:
    """Compare logits [A, V] along one answer, both teacher-forced on it.

    Raises:
        ValueError: the shapes differ.
    """
    if reference.shape != other.shape:
        raise ValueError(f"logits of shapes {tuple(reference.shape)} and {tuple(other.shape)} cannot be compared")
    p, q = reference.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
    kl = (p.exp() * (p - q)).sum(dim=-1).mean()
    agreement = (reference.argmax(dim=-1) == other.argmax(dim=-1)).double().mean()
    return Divergence(kl=float(kl), agreement=float(agreement))
