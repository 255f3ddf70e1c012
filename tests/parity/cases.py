"""Prompts of random tokens over captured chunks of any length, and the oracle's answer to them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from speccache_rag import SpecCache
from speccache_rag.engines.base import CaptureRequest
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan, runs
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.naive import naive_prefill
from speccache_rag.types import Chunk, ChunkKey, ChunkKV
from tests.hosts import host_of
from tests.parity.engines import assert_kv_equal, store_of, written_kv
from tests.tiny import VOCAB_SIZE

ANCHOR = tuple(range(5, 16))


@dataclass(frozen=True)
class Layout:
    """What a prompt of a case looks like."""

    lengths: tuple[int, ...]
    """Tokens of each chunk; a chunk of none is not there."""
    ratio: float = 0.3
    seed: int = 0
    head: int = 7
    """Fresh tokens in front."""
    gap: int = 3
    """Fresh tokens between chunks."""
    tail: int = 3
    """Fresh tokens behind the last chunk; 0 ends the prompt with it."""
    cut: int = 0
    """So many tokens of the last chunk were cut off."""
    edges: bool = False
    """Recompute the first and the last token of every chunk too."""


class Case:
    """A plan, and its chunks captured by an engine and in its store."""

    def __init__(self, sc: SpecCache, layout: Layout) -> None:
        rng = np.random.default_rng(layout.seed)
        self.sc = sc
        self.store = store_of(sc)
        ids = tokens(rng, layout.head)
        chunks: list[PlannedChunk] = []
        lengths = [length for length in layout.lengths if length]
        for index, length in enumerate(lengths):
            chunk = self._captured(tokens(rng, length))
            last = index == len(lengths) - 1
            used = max(1, length - layout.cut) if last else length
            chunks.append(PlannedChunk(str(chunk.key), len(ids), used))
            ids = (*ids, *chunk.token_ids[:used], *tokens(rng, layout.tail if last else layout.gap))
        n = len(ids)
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        chosen = set(positions[rng.random(len(positions)) < layout.ratio].tolist())
        if layout.edges:
            chosen |= {p for chunk in chunks for p in (chunk.start, chunk.end - 1)}
        self.chosen = np.array(sorted(chosen), dtype=np.int64)
        self.plan = ReusePlan(ids, tuple(chunks), tuple(runs(self.chosen)), kind="case")
        self.reused = torch.zeros(n, dtype=torch.bool)
        self.reused[torch.from_numpy(np.setdiff1d(positions, self.chosen))] = True
        self.reused[-1] = False  # the last token's logits are needed

    def _captured(self, ids: tuple[int, ...]) -> Chunk:
        key = ChunkKey(hashlib.sha256(repr(ids).encode()).hexdigest())
        chunk = Chunk(key, "", ids, np.zeros((len(ids), 2), np.int32))
        host = host_of(self.sc)
        host.loop.run(host.engine.capture(CaptureRequest(chunk, ANCHOR)))
        return chunk

    def written(self) -> ChunkKV:
        """The KV that the engine's prefill leaves."""
        return written_kv(self.sc, self.plan)

    def logprobs(self) -> dict[int, float]:
        """The most likely tokens after the prompt."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 8, "ignore_eos": True}
        host = host_of(self.sc)
        (found,) = [d for d in host.loop.iterate(lambda: host.engine.generate(self.plan, sampling)) if d.logprobs]
        assert found.logprobs is not None
        return dict(found.logprobs[0])

    def naive(self, oracle: TargetModel) -> tuple[ChunkKV, torch.Tensor]:
        """All KV and the last token's logits, from the oracle over the stored KV; what is not reused is NaN there."""
        shape = oracle.shape
        size = (shape.n_layers, len(self.plan.token_ids), shape.n_heads, shape.head_dim)
        keys, values = torch.full(size, float("nan")), torch.full(size, float("nan"))
        for p in self.plan.chunks:
            kv = self.store.get(ChunkKey(p.key))
            assert kv is not None
            keys[:, p.start : p.end] = oracle.rope.move(kv.keys[:, : p.length], p.start - kv.position)
            values[:, p.start : p.end] = kv.values[:, : p.length]
        keys[:, ~self.reused], values[:, ~self.reused] = float("nan"), float("nan")
        stored = ChunkKV(keys, values, self.plan.token_ids, 0)
        found = naive_prefill(oracle, self.plan.token_ids, stored, self.reused)
        assert not found[0].keys.isnan().any(), "the oracle read a row that is not reused"
        return found

    def poison(self, positions: Sequence[int] | np.ndarray, value: float) -> None:
        """Put `value` for the stored KV of these positions of the prompt."""
        wanted = np.asarray(positions)
        for p in self.plan.chunks:
            rows = torch.from_numpy(wanted[(wanted >= p.start) & (wanted < p.end)] - p.start)
            kv = self.store.get(ChunkKey(p.key))
            assert kv is not None
            self.store.delete(ChunkKey(p.key))
            self.store.put(ChunkKey(p.key), poisoned(kv, rows, value))

    def forget(self) -> None:
        """Leave the store as it was."""
        for p in self.plan.chunks:
            self.store.delete(ChunkKey(p.key))


def assert_equals_naive(case: Case, oracle: TargetModel, atol: float) -> None:
    """Selective recompute is what the oracle says: KV of every token in every layer, and logprobs of what follows."""
    kv, logits = case.naive(oracle)
    assert_kv_equal(case.written(), kv, atol=atol)
    expected = logits.float().log_softmax(-1)
    found = case.logprobs()
    assert len(found) >= 8
    for token, logprob in found.items():
        assert abs(logprob - float(expected[token])) <= atol, (token, logprob, float(expected[token]))


def load_target(folder: Path, attn_implementation: str = "sdpa") -> TargetModel:
    """A model as the Transformers engine loads it."""
    return TargetModel.load(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=2048,
        attn_implementation=attn_implementation,
    )


def tokens(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """Ordinary tokens of the tiny vocabulary."""
    return tuple(rng.integers(3, VOCAB_SIZE - 100, n).tolist())


def poisoned(kv: ChunkKV, rows: torch.Tensor, value: float) -> ChunkKV:
    """A copy with `value` in these rows of every layer."""
    keys, values = kv.keys.clone(), kv.values.clone()
    keys[:, rows], values[:, rows] = value, value
    return replace(kv, keys=keys, values=values)
