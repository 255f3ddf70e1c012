"""Measurements of a chunk store: how fast KV comes from each tier, and what a catalogue of many chunks costs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.index import ChunkIndex
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.store.base import ChunkStore, Namespace
from speccache_rag.store.disk import DiskStore
from speccache_rag.store.memory import MemoryStore
from speccache_rag.store.tiered import TieredStore
from speccache_rag.types import Chunk, ChunkKey, ChunkKV

_NAMESPACE = Namespace("bench", "bfloat16", "{}", ())


@dataclass(frozen=True, slots=True)
class KVShape:
    """Of a model's KV: layers, KV heads, head dim; bfloat16."""

    n_layers: int
    n_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TierResult:
    """The KV of a prompt's chunks from one tier into a cache."""

    tier: str
    bytes: int
    load_s: float
    """Reading, verifying where the tier does, and copying into the cache; the median of the rounds."""
    move_s: float
    """Positional recovery of the keys."""

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.load_s / 1e9

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}


@dataclass(frozen=True, slots=True)
class CatalogueResult:
    """A catalogue opened by a fresh index."""

    n_chunks: int
    start_s: float
    find_s: float
    """A prompt of 19,000 characters with eight known chunks in it; the median."""
    rss_bytes_per_chunk: float


def measure_tiers(folder: Path, shape: KVShape, n_tokens: int, n_chunks: int, rounds: int) -> list[TierResult]:
    """Time `n_tokens` in `n_chunks` chunks from a plain copy (the limit), RAM, and disk in the page cache."""
    size = n_tokens // n_chunks
    kvs = {_NAMESPACE.key((i,)): _random_kv(shape, size, i) for i in range(n_chunks)}
    total = sum(kv.nbytes for kv in kvs.values())
    cache = torch.empty(2, shape.n_layers, n_tokens, shape.n_heads, shape.head_dim, dtype=torch.bfloat16)
    cache.zero_()  # its pages are touched before the clock runs
    rope, places = _rope(shape), torch.arange(n_tokens)
    move_s = _median(rounds, lambda: rope.move(cache[0], places))

    def load(get: Callable[[ChunkKey], ChunkKV | None]) -> float:
        def once() -> None:
            for number, key in enumerate(kvs):
                kv = get(key)
                assert kv is not None
                here = slice(number * size, (number + 1) * size)
                cache[0, :, here].copy_(kv.keys)
                cache[1, :, here].copy_(kv.values)

        return _median(rounds, once)

    results = [TierResult("memory copy", total, load(kvs.get), move_s)]
    with DiskStore(folder) as disk:
        tiered: ChunkStore = TieredStore(DiskStore(folder), MemoryStore(2 * total))
        for key, kv in kvs.items():
            tiered.put(key, kv)
        results.append(TierResult("RAM", total, load(tiered.get), move_s))
        results.append(TierResult("disk, page cache, one thread", total, load(disk.get), move_s))
        results.append(
            TierResult("disk, page cache, read ahead", total, _read_ahead(folder, list(kvs), load, total), move_s)
        )
        tiered.close()
    return results


def measure_catalogue(folder: Path, n_chunks: int, rounds: int = 20) -> CatalogueResult:
    """Time the start of an index over `n_chunks` chunks, and a search."""
    path = str(folder / "catalogue.sqlite")
    catalogue = Catalogue(path)
    offsets = np.stack([np.arange(0, 1000, 5), np.arange(5, 1005, 5)], axis=1).astype(np.int32)
    step = 5000
    for first in range(0, n_chunks, step):
        catalogue.add_many("bench", (_chunk(i, offsets) for i in range(first, min(first + step, n_chunks))))
    catalogue.close()
    before, started = _rss_bytes(), time.perf_counter()
    index = ChunkIndex(Catalogue(path), "bench")
    start_s = time.perf_counter() - started
    grown = max(0, _rss_bytes() - before)
    inside = [_chunk(i * n_chunks // 8, offsets).text for i in range(8)]
    prompt = "\n---\n".join(inside)
    prompt += "\nA question that holds nothing known. " * ((19_000 - len(prompt)) // 38)
    assert len(index.find(prompt)) == 8
    return CatalogueResult(n_chunks, start_s, _median(rounds, lambda: index.find(prompt)), grown / n_chunks)


def _read_ahead(folder: Path, keys: list[ChunkKey], load: Callable[[Callable[..., Any]], float], total: int) -> float:
    """Load as an engine does: all are requested at once, then taken. Each round has a RAM of its own."""
    store = TieredStore(DiskStore(folder), MemoryStore(2 * total))

    def get(key: ChunkKey) -> ChunkKV | None:
        nonlocal store
        if key == keys[0]:
            store.close()
            store = TieredStore(DiskStore(folder), MemoryStore(2 * total))
            store.request(keys)
        return store.get(key)

    try:
        return load(get)
    finally:
        store.close()


def _rope(shape: KVShape) -> RopeTable:
    angles = torch.arange(8192)[:, None] / 10_000 ** (torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    return RopeTable(angles.cos(), angles.sin(), True)


def _random_kv(shape: KVShape, n_tokens: int, seed: int) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    size = shape.n_layers, n_tokens, shape.n_heads, shape.head_dim
    keys, values = (torch.randn(size, generator=generator).to(torch.bfloat16) for _ in range(2))
    return ChunkKV(keys, values, tuple(range(n_tokens)), 0)


def _chunk(number: int, offsets: np.ndarray) -> Chunk:
    words = f"{number * 2_654_435_761 % 2**32:08x} {number} "
    text = (words * (1000 // len(words) + 1))[:1000]
    return Chunk(ChunkKey(f"{number:064x}"), text, tuple(range(len(offsets))), offsets)


def _median(rounds: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _rss_bytes() -> int:
    """Of this process, now where the system tells, else at most."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
