"""An `Engine` in this process, without a model, and what else the runtime needs beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.base import (
    CaptureRequest,
    CaptureResult,
    EngineDelta,
    ModelFacts,
    ReuseOutcome,
)
from speccache_rag.engines.reuse.deviation import check_layer
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.errors import EngineClosed
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.questions import KVDeviation, TargetQuestion
from speccache_rag.store.base import Namespace
from speccache_rag.store.quantization import KvDtype
from speccache_rag.types import ChunkKey, Offsets

MAX_MODEL_LEN = 512
BYTES_PER_TOKEN = 10
N_LAYERS = 4


class FakeEngine:
    """Answers every prompt alike, and does what its attributes say."""

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
        """Keys that vanish between a prompt's plan and its load."""
        self.cached_tokens = 0
        """Tokens its prefix cache holds of every prompt."""
        self.faults: dict[str, Exception] = {}
        """Chunk texts whose capture fails."""
        self.start_fault: BaseException | None = None
        self.capture_s = self.answer_s = 0.0
        self.captured: list[CaptureRequest] = []
        self.prefetched: list[ChunkKey] = []
        self.served: list[ReusePlan] = []
        self.asked: list[TargetQuestion] = []
        self.question_fault: Exception | None = None
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

    async def generate(self, plan: ReusePlan, sampling: Mapping[str, Any]) -> AsyncGenerator[EngineDelta, None]:
        self._check()
        self.served.append(plan)
        yield EngineDelta("an ", 1)
        await asyncio.sleep(self.answer_s)
        self._check()
        yield EngineDelta("answer", 1, True, "stop", self.outcome(plan))

    async def ask(self, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
        """Each token's own id."""
        self._check()
        if isinstance(question, KVDeviation):
            check_layer(question.layer, N_LAYERS)
        self.asked.append(question)
        if self.question_fault is not None:
            raise self.question_fault
        return np.array(plan.token_ids, dtype=np.float32)

    def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        return np.array([key in self.held for key in keys], dtype=bool)

    async def stored(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        return self.present(keys)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        self._check()
        self.held.difference_update(keys)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self._check()
        self.prefetched += keys

    async def reset_prefix_cache(self) -> None:
        self.cached_tokens = 0

    def close(self) -> None:
        self.closed = True

    def outcome(self, plan: ReusePlan) -> ReuseOutcome:
        """What the engine finds: it meets a hole only in what its prefix cache does not hold."""
        cached = min(self.cached_tokens, len(plan.token_ids) - 1)
        gone = self.holes | {c.key for c in plan.stored} - self.held
        missed = [c.key for c in plan.stored if c.key in gone and min(c.end, plan.fill_end) > cached]
        return ReuseOutcome(cached_tokens=cached, missed_keys=tuple(dict.fromkeys(missed)))

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


class FakeHost:
    """A host whose parts are given; its loop is the one that asks."""

    def __init__(
        self, tokenizer: PromptTokenizer, library: ChunkLibrary, engine: FakeEngine, scorer: FakeScorer | None
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self._library = library
        self._scorer = scorer

    def library(self, config: SpecCacheConfig) -> ChunkLibrary:
        return self._library

    def scorer(self, config: SpecCacheConfig, layers: str) -> FakeScorer | None:
        return self._scorer


def make_library(
    tokenizer: PromptTokenizer,
    catalogue: Catalogue | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    *,
    anchor: str | None = None,
    tenant: str | None = None,
    kv_dtype: KvDtype = "auto",
) -> ChunkLibrary:
    """A library as the host makes it, with the chat template's header as the anchor unless another is given."""
    anchor = tokenizer.header() if anchor is None else anchor
    namespace = Namespace("fingerprint", "float32", "{}", tokenizer.encode(anchor), tenant, kv_dtype)
    return ChunkLibrary(tokenizer, namespace, catalogue or Catalogue(), anchor, max_model_len)
