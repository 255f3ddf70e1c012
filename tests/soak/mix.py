"""The mix of a soak: requests of every kind over a few captured chunks, each with one right answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan, runs
from speccache_rag.scoring.questions import KVDeviation, QueryAttention, TargetQuestion
from speccache_rag.types import Chunk, ChunkKey
from tests.parity.cases import tokens

ANCHOR = tuple(range(5, 16))
LENGTHS = (15, 16, 17, 40, 63, 90, 120)
TENANTS = ("", "north", "south")
LOST = "lost"
CORRUPT = "corrupt"


@dataclass(frozen=True)
class Item:
    """A request, or a question about one. The same item may be asked often."""

    name: str
    plan: ReusePlan
    n_tokens: int = 0
    question: TargetQuestion | None = None


def key_of(*parts: object) -> ChunkKey:
    """A key of its own for anything."""
    return ChunkKey(hashlib.sha256(repr(parts).encode()).hexdigest())


def chunk_of(ids: tuple[int, ...], *parts: object) -> Chunk:
    """A chunk of these tokens. Other `parts` (a tenant, a damage) make it another one of the same tokens."""
    return Chunk(key_of(ids, *parts), "", ids, np.zeros((len(ids), 2), np.int32))


class Mix:
    """Chunks, and items over them, all of one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        texts = [tokens(self._rng, length) for length in LENGTHS]
        self._texts = texts
        self.chunks = [chunk_of(ids, tenant) for ids in texts for tenant in TENANTS]
        """To be captured: what tenants know is stored for each of them."""
        self.corrupt = [chunk_of(ids, CORRUPT, number) for number, ids in enumerate(texts)]
        """To be captured, and their files damaged."""

    def items(self, count: int) -> list[Item]:
        """So many different items."""
        makers = (self._reusing, self._reusing, self._holes, self._plain, self._plain, self._ratio_one, self._question)
        return [makers[number % len(makers)](number) for number in range(count)]

    def _reusing(self, number: int) -> Item:
        plan = self._plan(number, self._some_texts())
        return Item(f"reuse {number}", plan, self._n_tokens())

    def _holes(self, number: int) -> Item:
        """Some of its chunks are not in the store, or their files do not verify."""
        which = self._some_texts()
        damaged = {int(self._rng.choice(which)): str(self._rng.choice([LOST, CORRUPT])), which[0]: LOST}
        return Item(f"holes {number}", self._plan(number, which, damaged), self._n_tokens())

    def _ratio_one(self, number: int) -> Item:
        plan = self._plan(number, self._some_texts())
        every = tuple((chunk.start, chunk.end) for chunk in plan.chunks)
        return Item(f"ratio one {number}", replace(plan, recompute=every), self._n_tokens())

    def _plain(self, number: int) -> Item:
        """Plain prompts of a tenant begin alike, so that they share its prefix cache."""
        which = range(int(self._rng.integers(1, 4)))
        ids = ANCHOR + sum((self._texts[i] for i in which), ()) + tokens(self._rng, 4)
        return Item(f"plain {number}", ReusePlan(ids, kind=self._tenant()), self._n_tokens())

    def _question(self, number: int) -> Item:
        question = KVDeviation("key", 2) if self._rng.random() < 0.5 else QueryAttention("target", "all")
        return Item(f"question {number}", self._plan(number, self._some_texts()), question=question)

    def _plan(self, number: int, which: Sequence[int], damaged: dict[int, str] | None = None) -> ReusePlan:
        tenant, ratio = self._tenant(), float(self._rng.choice([0.0, 0.15, 0.6]))
        # Begins like no other: what two approximations share of one prefix is a matter of who came first.
        ids = (*ANCHOR, *tokens(self._rng, 6))
        placed = []
        for i in which:
            damage = (damaged or {}).get(i)
            owners: tuple[object, ...] = (tenant,)
            if damage == LOST:
                owners = (LOST, number)
            elif damage == CORRUPT:
                owners = (CORRUPT, i)
            placed.append(PlannedChunk(chunk_of(self._texts[i], *owners).key, len(ids), len(self._texts[i])))
            ids += (*self._texts[i], *tokens(self._rng, int(self._rng.integers(0, 4))))
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in placed])
        chosen = positions[self._rng.random(len(positions)) < ratio]
        tail = tokens(self._rng, int(self._rng.integers(0, 9)))
        kind = f"{tenant or 'nobody'} {ratio}"
        return ReusePlan((*ids, *tail), tuple(placed), tuple(runs(chosen)), len(ANCHOR), kind)

    def _some_texts(self) -> list[int]:
        count = int(self._rng.integers(1, 5))
        return [int(i) for i in self._rng.permutation(len(self._texts))[:count]]

    def _tenant(self) -> str:
        return str(self._rng.choice(TENANTS))

    def _n_tokens(self) -> int:
        return int(self._rng.choice([1, 4, 12, 80]))
