"""An `Engine` in this process, without a model, and what else the runtime needs beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.engines.base import (
    CaptureRequest,
    CaptureResult,
    EngineDelta,
    EngineRequest,
    ModelFacts,
    ReuseOutcome,
)
from speccache_rag.errors import EngineClosed
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.store.base import Namespace
from speccache_rag.types import ChunkKey, Offsets

MAX_MODEL_LEN = 512
BYTES_PER_TOKEN = 10


class FakeEngine:
    """Counts tokens as the worker half does, and does what its attributes say."""

    def __init__(
        self, model: Path = Path(), options: dict[str, Any] | None = None, store: dict[str, Any] | None = None
    ) -> None:
        self.model = model
        self.options = options or {}
        self.store = store or {}
        self.facts = ModelFacts("fingerprint", "float32", "{}", self.options.get("max_model_len", MAX_MODEL_LEN))
        self.held: set[str] = set()
        """Keys in the store."""
        self.holes: set[str] = set()
        """Keys that vanish between a request's arrival and its load."""
        self.cached_tokens = 0
        """Tokens its prefix cache holds of every prompt."""
        self.faults: dict[str, Exception] = {}
        """Chunk texts whose capture fails."""
        self.start_fault: BaseException | None = None
        self.capture_s = self.answer_s = 0.0
        self.captured: list[CaptureRequest] = []
        self.prefetched: list[ChunkKey] = []
        self.in_flight = self.most_in_flight = 0
        self.started = self.closed = False
        self.thread = ""

    async def start(self) -> None:
        self.thread = threading.current_thread().name
        if self.start_fault is not None:
            raise self.start_fault
        self.started = True

    async def capture(self, request: CaptureRequest) -> CaptureResult:
        self._check()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.capture_s)
            if fault := self.faults.get(request.chunk.text):
                raise fault
        finally:
            self.in_flight -= 1
        self.captured.append(request)
        self.held.add(request.chunk.key)
        n_tokens = request.chunk.n_tokens
        return CaptureResult(request.chunk.key, n_tokens, n_tokens * BYTES_PER_TOKEN)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        self._check()
        yield EngineDelta("an ", 1)
        await asyncio.sleep(self.answer_s)
        yield EngineDelta("answer", 1, True, "stop", self.outcome(request))

    async def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        self._check()
        return np.array([key in self.held for key in keys], dtype=bool)

    async def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self._check()
        self.prefetched += keys

    async def reset_prefix_cache(self) -> None:
        self.cached_tokens = 0

    def close(self) -> None:
        self.closed = True

    def outcome(self, request: EngineRequest) -> ReuseOutcome:
        """What the worker reports: it knows the placements and the selection of the request, and nothing else."""
        cached = min(self.cached_tokens, request.prompt.n_tokens - 1)
        if request.selection is None or cached >= request.prompt.region_end:
            return ReuseOutcome(cached_tokens=cached)
        chosen = set(request.selection.positions.tolist())
        counts = {"loaded_tokens": 0, "recomputed_tokens": 0, "missed_tokens": 0}
        missed_keys = []
        for placement in request.prompt.placements:
            live = set(range(max(placement.start, cached), placement.end))
            if placement.chunk.key in self.holes:
                counts["missed_tokens"] += len(live)
                missed_keys += [placement.chunk.key] if live else []
            else:
                counts["recomputed_tokens"] += len(live & chosen)
                counts["loaded_tokens"] += len(live - chosen)
        return ReuseOutcome(cached_tokens=cached, missed_keys=tuple(missed_keys), **counts)

    def _check(self) -> None:
        if self.closed:
            raise EngineClosed("The engine was closed.")


class FakeScorer:
    """Scores each character by its code point; `calls` holds what was scored."""

    def __init__(self, identity: str = "fake") -> None:
        self.identity = identity
        self.calls: list[tuple[str, str | None]] = []
        self.fault: Exception | None = None

    def score(self, text: str) -> tuple[Offsets, np.ndarray]:
        self.calls.append((text, None))
        return self._score(text)

    def score_after(self, prefix: str, text: str) -> tuple[Offsets, np.ndarray]:
        self.calls.append((text, prefix))
        return self._score(text)

    def _score(self, text: str) -> tuple[Offsets, np.ndarray]:
        if self.fault is not None:
            raise self.fault
        starts = np.arange(len(text), dtype=np.int32)
        return np.stack((starts, starts + 1), axis=1), np.array([ord(c) for c in text], dtype=np.float32)


class FakeModels:
    """Answers a probe with one scorer, whatever the layers."""

    def __init__(self, scorer: FakeScorer | None) -> None:
        self._scorer = scorer

    def scorer(self, layers: str) -> FakeScorer:
        assert self._scorer is not None, "nobody should ask"
        return self._scorer


def make_library(
    tokenizer: PromptTokenizer, catalogue: Catalogue | None = None, max_model_len: int = MAX_MODEL_LEN
) -> ChunkLibrary:
    """A library as the host makes it, with the chat template's header as the anchor."""
    anchor = tokenizer.header()
    namespace = Namespace("fingerprint", "float32", "{}", tokenizer.encode(anchor))
    return ChunkLibrary(tokenizer, namespace, catalogue or Catalogue(), anchor, max_model_len)
