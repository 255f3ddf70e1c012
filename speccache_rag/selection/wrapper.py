"""`Wrapper`: a policy that changes what another one is asked, told or allowed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from speccache_rag.scoring.questions import Question
from speccache_rag.selection.base import Answers, SelectionPolicy
from speccache_rag.types import AssembledPrompt, Placement


@dataclass(frozen=True)
class Wrapper(SelectionPolicy):
    """A policy around `inner`; in an expression it stands before a + (selection/expression.py).

    It chooses among the tokens that its own prompt has, and asks at least what the inner policy asks.
    """

    inner: SelectionPolicy = field(kw_only=True)

    def questions(self) -> tuple[Question, ...]:
        """What the inner policy asks."""
        return self.inner.questions()

    def choose_within(
        self, prompt: AssembledPrompt, placements: list[Placement], budget: int, answers: Answers
    ) -> np.ndarray:
        """What the inner policy chooses of these placements, or parts of placements, alone."""
        part = replace(prompt, placements=tuple(placements))
        if not 0 < budget < part.n_chunk_tokens:
            return part.chunk_positions()[: max(0, budget)]
        return self.inner.choose(part, budget, answers)
