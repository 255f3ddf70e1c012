"""The contract of a selection policy, and the one budget rule they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.layers import LayerRange
from speccache_rag.types import AssembledPrompt, Selection


class Probe(Protocol):
    """What a policy may ask about a prompt. A policy pays only for what it asks."""

    def importance(self, layers: LayerRange = "last_third") -> np.ndarray:
        """float32 [T] over prompt tokens: the speculative model's importance score I_i (paper section 2.2).

        Tokens outside chunks may be NaN. `layers` are the layers whose norms are averaged.

        Raises:
            ConfigurationError: no speculative model is configured.
        """
        ...

    def kv_deviation(self, *, layer: int, of: Literal["value", "key"]) -> np.ndarray:
        """float32 [T] over prompt tokens: squared L2 distance between stored and true KV at `layer` of the target.

        True KV is that of a full prefill of this prompt. Tokens outside chunks may be NaN. Costs the target's first
        `layer + 1` layers over the whole reuse region; layer 0 never deviates.

        Raises:
            ConfigurationError: the model has no such layer.
        """
        ...

    def query_attention(self, *, scorer: Literal["speculative", "target"], layers: LayerRange) -> np.ndarray:
        """float32 [T] over prompt tokens: the attention that the query pays them in `layers` of the scoring model.

        The mean over query tokens of the maximum over heads and layers of the attention probability, where the scorer
        reuses its own chunk KV and runs only what is not in a chunk. Tokens outside chunks may be NaN.

        Raises:
            ConfigurationError: the scorer is "speculative" and no speculative model is configured.
        """
        ...


@dataclass(frozen=True)
class SelectionPolicy(ABC):
    """One way to choose the chunk tokens to recompute. Fields of a subclass are its options."""

    reuses: ClassVar[bool] = True
    """False where no stored KV is used at all, so that the engine prefills plainly."""

    @property
    def needs_speculative_model(self) -> bool:
        """True where `choose` asks the probe for something that a speculative model answers."""
        return False

    @property
    def needs_speculative_kv(self) -> bool:
        """True where the speculative model should have chunk KV of its own, made when chunks are warmed."""
        return False

    @abstractmethod
    def choose(self, prompt: AssembledPrompt, budget: int, probe: Probe) -> np.ndarray:
        """Positions to recompute, int64, in any order; at most `budget` (K) unless the policy documents its slack."""

    def select(self, prompt: AssembledPrompt, recompute_ratio: float, probe: Probe) -> Selection:
        """`choose` under K = ceil(recompute_ratio * N), N the chunk tokens; sorted and unique.

        Raises:
            ConfigurationError: the ratio is outside [0, 1], or the policy chose something else than chunk tokens.
        """
        if not 0.0 <= recompute_ratio <= 1.0:
            raise ConfigurationError(
                f"recompute_ratio is {recompute_ratio}; it must be in [0, 1].",
                hint="0 reuses every chunk token, 1 recomputes all of them.",
            )
        n = prompt.n_chunk_tokens
        chosen = np.asarray(self.choose(prompt, budget(recompute_ratio, n), probe) if n else [])
        # A mask would be read as positions 0 and 1, and a position outside chunks would count as a chunk token.
        if chosen.size and (chosen.dtype.kind not in "iu" or not np.isin(chosen, prompt.chunk_positions()).all()):
            raise ConfigurationError(
                f"{type(self).__name__}.choose gave {chosen!r}, which are not positions of chunk tokens.",
                hint="Return integers out of prompt.chunk_positions().",
            )
        return Selection(np.unique(chosen).astype(np.int64), recompute_ratio, n)


def chunk_scores(prompt: AssembledPrompt, scores: np.ndarray, what: str) -> np.ndarray:
    """Of `scores` [T], those of chunk tokens, [N] in the order of `prompt.chunk_positions()`.

    Raises:
        ValueError: there is not one finite score for each; a hole is a mistake of the scorer and must not be ranked.
    """
    if scores.shape != (prompt.n_tokens,):
        raise ValueError(f"{what} has shape {scores.shape}; the prompt has {prompt.n_tokens} tokens")
    positions = prompt.chunk_positions()
    chosen: np.ndarray = scores[positions]
    bad = positions[~np.isfinite(chosen)]
    if len(bad):
        raise ValueError(f"{what} is not finite at {len(bad)} chunk tokens, the first at position {bad[0]}")
    return chosen


def top_k(prompt: AssembledPrompt, scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` chunk tokens with the largest of `scores` [N]; ties by position."""
    ranking = np.argsort(-scores, kind="stable")
    return prompt.chunk_positions()[ranking[:k]]


def budget(recompute_ratio: float, n_chunk_tokens: int) -> int:
    """K = ceil(rho * N). Guarded against float dust: 0.15 * 100 is 15, not 15.000000000000002."""
    return min(n_chunk_tokens, math.ceil(recompute_ratio * n_chunk_tokens - 1e-9))


def check_number(name: str, value: object, *, low: float, high: float = math.inf, whole: bool = False) -> None:
    """Refuse a policy option that is no number in [low, high], or no whole number where `whole` is set.

    Raises:
        ConfigurationError: names the option, its value and its limits.
    """
    kinds = int if whole else (int, float)
    # bool is an int to Python, but never a sensible number here.
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        limit = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise ConfigurationError(
            f"{name} is {value!r}; it must be a {'whole ' if whole else ''}number {limit}.",
            hint="Leave the option out to take its default.",
        )
