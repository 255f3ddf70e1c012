"""The contract of a selection policy, and the one budget rule they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.questions import Importance, QueryAttention, Question
from speccache_rag.types import AssembledPrompt, Selection

Answers = Mapping[Question, np.ndarray]
"""What was asked about a prompt: one float32 [T] over its tokens for each question (scoring/questions.py)."""


@dataclass(frozen=True)
class SelectionPolicy(ABC):
    """One way to choose the chunk tokens to recompute. Fields of a subclass are its options."""

    reuses: ClassVar[bool] = True
    """False where no stored KV is used at all, so that the engine prefills plainly."""
    fixed_ratio: ClassVar[float | None] = None
    """The ratio of a policy that has one of its own, whatever is asked for; None for all others."""

    def questions(self) -> tuple[Question, ...]:
        """What `choose` has to know about a prompt; a policy pays only for what it asks."""
        return ()

    @property
    def needs_speculative_model(self) -> bool:
        """Whether a speculative model answers one of the questions."""
        return self.needs_speculative_kv or any(isinstance(q, Importance) for q in self.questions())

    @property
    def needs_speculative_kv(self) -> bool:
        """Whether the speculative model should have chunk KV of its own, made when chunks are warmed."""
        return any(isinstance(q, QueryAttention) and q.scorer == "speculative" for q in self.questions())

    @abstractmethod
    def choose(self, prompt: AssembledPrompt, budget: int, answers: Answers) -> np.ndarray:
        """Positions to recompute, int64, in any order; at most `budget` (K) unless the policy documents its slack.

        Args:
            prompt: its placements are the chunks to choose from (docs/policies.md says which those are).
            budget: more than 0, and less than the number of chunk tokens.
            answers: one for each of `questions()`.
        """

    def budget(self, prompt: AssembledPrompt, recompute_ratio: float) -> int:
        """K = ceil(rho * N), N being the tokens to choose from.

        Raises:
            ConfigurationError: the ratio is outside [0, 1].
        """
        if not 0.0 <= recompute_ratio <= 1.0:
            raise ConfigurationError(
                f"recompute_ratio is {recompute_ratio}; it must be in [0, 1].",
                hint="0 reuses every chunk token, 1 recomputes all of them.",
            )
        n = prompt.n_chunk_tokens
        ratio = recompute_ratio if self.fixed_ratio is None else self.fixed_ratio
        # Guarded against float dust: 0.15 * 100 is 15, not 15.000000000000002.
        return min(n, math.ceil(ratio * n - 1e-9))

    def questions_about(self, prompt: AssembledPrompt, recompute_ratio: float) -> tuple[Question, ...]:
        """What has to be asked before `select`: nothing where the budget is none or all, so that nothing is chosen."""
        return self.questions() if 0 < self.budget(prompt, recompute_ratio) < prompt.n_chunk_tokens else ()

    def select(self, prompt: AssembledPrompt, recompute_ratio: float, answers: Answers) -> Selection:
        """The positions to recompute, sorted and unique: none, all, or what `choose` says.

        Raises:
            ConfigurationError: the ratio is outside [0, 1], or the policy chose something else than chunk tokens.
        """
        budget, positions = self.budget(prompt, recompute_ratio), prompt.chunk_positions()
        if not 0 < budget < len(positions):
            return Selection(positions[:budget], recompute_ratio, len(positions))
        chosen = np.asarray(self.choose(prompt, budget, answers))
        # A mask would be read as positions 0 and 1, and a position outside chunks would count as a chunk token.
        if chosen.size and (chosen.dtype.kind not in "iu" or not np.isin(chosen, positions).all()):
            raise ConfigurationError(
                f"{type(self).__name__}.choose gave {chosen!r}, which are not positions of chunk tokens.",
                hint="Return integers out of prompt.chunk_positions().",
            )
        return Selection(np.unique(chosen).astype(np.int64), recompute_ratio, len(positions))


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
