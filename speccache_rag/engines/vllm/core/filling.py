"""The scheduler's account of one fill: what it waits for, and how far its slices are dealt."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.vllm.messages import FillSlice
from speccache_rag.scoring.questions import KVDeviation, TargetQuestion

LOADED_PER_COMPUTED = 32
"""Moving and writing this many stored tokens takes about as long as computing one."""


@dataclass(slots=True)
class Filling:
    """A request whose reuse region is being filled, from admission to the last dealt slice."""

    request_id: str
    plan: ReusePlan
    computed: int
    question: TargetQuestion | None
    n_layers: int
    ranks: int = 0
    """Ranks that have all stored KV in RAM."""
    missed_keys: frozenset[str] = frozenset()
    size: int | None = None
    """Positions to compute; None until every rank has loaded."""
    cursor: int = 0
    dealt: bool = field(default=False)
    """The last slice is on its way."""

    def loaded(self, ranks: int, lacking: frozenset[str], world_size: int) -> None:
        """Some more ranks have their KV. When all have, the positions are known to all of them alike."""
        self.ranks += ranks
        self.missed_keys |= lacking
        if self.ranks == world_size:
            self.size = len(self.plan.positions(self.computed, self.missed_keys))

    def deal(self, room: int) -> tuple[FillSlice, int] | None:
        """The next slice into a step that has room for `room` more tokens, and what it costs in tokens.

        None where there is nothing to deal, or no room.
        """
        if self.size is None or self.dealt or room <= 0:
            return None
        if self.question is not None:
            self.dealt = True
            return FillSlice(self.request_id, 0, self.size, True, self.missed_keys), self._question_cost()
        loading = self._loading_cost() if self.cursor == 0 else 0
        start = self.cursor
        self.cursor = min(self.size, start + max(1, room - loading))
        self.dealt = self.cursor == self.size
        slice_ = FillSlice(self.request_id, start, self.cursor, self.dealt, self.missed_keys)
        return slice_, loading + self.cursor - start

    def _loading_cost(self) -> int:
        loaded = sum(c.end - max(c.start, self.computed) for c in self.plan.stored if c.end > self.computed)
        return math.ceil(loaded / LOADED_PER_COMPUTED)

    def _question_cost(self) -> int:
        if isinstance(self.question, KVDeviation):
            return math.ceil(self.plan.region_end * (self.question.layer + 1) / self.n_layers)
        assert self.size is not None
        return self._loading_cost() + self.size + len(self.plan.token_ids) - self.plan.fill_end


def deal(fillings: Iterable[Filling], room: int) -> list[FillSlice]:
    """Slices of the fillings, first come first served, until `room` tokens are spent. At most one question a step."""
    slices: list[FillSlice] = []
    asked = False
    for filling in fillings:
        if filling.question is not None and asked:
            continue
        dealt = filling.deal(room)
        if dealt is not None:
            slices.append(dealt[0])
            room -= dealt[1]
            asked = asked or filling.question is not None
    return slices
