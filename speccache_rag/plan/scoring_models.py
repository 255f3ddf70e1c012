"""The models that answer a policy's questions: the target, and the speculative model with chunk KV of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.warming import warm_chunks
from speccache_rag.config import Scoring, SpecCacheConfig
from speccache_rag.engines.reuse.plan import PlannedChunk, ReusePlan
from speccache_rag.errors import ChunkTooLong, ConfigurationError, EngineClosed
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.prompt.control import Rendered
from speccache_rag.scoring.alignment import align_scores
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.scoring.questions import Importance, QueryAttention, Question
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKey, WarmReport

logger = logging.getLogger(__name__)


class MissingKV(Exception):
    """The speculative model has no KV of a chunk, or no room for the prompt.

    The chunk was warmed for another policy, before the model was configured, or is too long for it.
    """


class ScoringModels:
    """Answers what policies ask. The speculative model's engine starts when first asked; `close` gives it up."""

    def __init__(self, host: EngineHost, config: SpecCacheConfig) -> None:
        self._host = host
        self._config = config
        self._lock = threading.Lock()
        self._companion: tuple[EngineHost, ChunkLibrary] | None = None
        self._closed = False

    def importance(
        self, question: Importance, prompt: AssembledPrompt, library: ChunkLibrary, scoring: Scoring
    ) -> np.ndarray:
        """float32 [T]: a forward pass over the prompt ("online"), or what was scored of its chunks ("cached").

        Raises:
            ConfigurationError: no speculative model is configured.
        """
        if scoring == "online":
            return self._online(question, prompt)
        scorer = self._scorer(question)
        found = np.full(prompt.n_tokens, np.nan, dtype=np.float32)
        for placement in prompt.placements:
            of_chunk = library.scores(placement.chunk, scorer)
            found[placement.start : placement.end] = of_chunk[: placement.length]
        return found

    async def ask(self, question: Question, plan: ReusePlan, prompt: AssembledPrompt) -> tuple[np.ndarray, str]:
        """float32 [T] over the target's tokens, and how it was found. To be awaited on the engine's loop.

        Where the speculative model lacks KV of some chunk, importance is scored online instead of its attention.

        Raises:
            ConfigurationError: the speculative model is asked, and none is configured; or the model cannot be asked.
            EngineError: the question failed.
        """
        assert not isinstance(question, Importance), "importance is answered beside the draft"
        if isinstance(question, QueryAttention) and question.scorer == "speculative":
            try:
                return await self._speculative_attention(question, plan, prompt), "attended"
            except MissingKV:
                importance = Importance(question.layers)
                return await asyncio.to_thread(self._online, importance, prompt), "online"
        scoring = "attended" if isinstance(question, QueryAttention) else "deviation"
        return await self._host.engine.ask(plan, question), scoring

    async def _speculative_attention(
        self, question: QueryAttention, plan: ReusePlan, prompt: AssembledPrompt
    ) -> np.ndarray:
        host, own, own_plan = await asyncio.to_thread(self._own_plan, plan, prompt)
        attention = await host.loop.run_from_loop(host.engine.ask(own_plan, question))
        return align_scores(own.offsets, attention, prompt.offsets)

    def _own_plan(self, plan: ReusePlan, prompt: AssembledPrompt) -> tuple[EngineHost, AssembledPrompt, ReusePlan]:
        """The prompt in the speculative model's own tokens, over its own chunk KV.

        Raises:
            MissingKV: it has none of some chunk that the target has.
        """
        host, library = self._speculative()
        matches = library.match(prompt.text)
        own = host.tokenizer.assemble(Rendered(prompt.text, prompt.spelled), matches)
        keys = [match.chunk.key for match in matches]
        known = {match.chunk.text for match in matches}
        stored = {chunk.key for chunk in plan.stored}
        wanted = {placement.chunk.text for placement in prompt.placements if placement.chunk.key in stored}
        if own.n_tokens > host.engine.facts.max_model_len or wanted - known or not host.engine.present(keys).all():
            raise MissingKV
        host.engine.prefetch(keys)
        chunks = tuple(PlannedChunk(str(p.chunk.key), p.start, p.length) for p in own.placements)
        return host, own, ReusePlan(own.token_ids, chunks)

    def warm(self, texts: Sequence[str], advance: Callable[[], None]) -> WarmReport:
        """Capture the texts' KV in the speculative model, under keys of its own in the same store.

        A text that its context is too short for is left out: prompts that hold it are scored online.
        """
        host, library = self._speculative()
        return host.loop.run(warm_chunks(host.engine, library, None, _fitting(library, texts), advance))

    def close(self) -> None:
        """Give up the speculative model's engine. Idempotent."""
        with self._lock:
            self._closed = True
            companion, self._companion = self._companion, None
        if companion is not None:
            companion[0].release()

    def _online(self, question: Importance, prompt: AssembledPrompt) -> np.ndarray:
        offsets, scores = self._scorer(question).score(prompt.text)
        return align_scores(offsets, scores, prompt.offsets)

    def _scorer(self, question: Importance) -> SpeculativeScorer:
        found = self._host.scorer(self._config, question.layers)
        if found is None:
            raise _no_speculative_model()
        return found

    def _speculative(self) -> tuple[EngineHost, ChunkLibrary]:
        if self._config.speculative_model is None:
            raise _no_speculative_model()
        with self._lock:
            if self._closed:
                raise EngineClosed("This SpecCache was closed.")
            if self._companion is None:
                config = SpecCacheConfig.build(
                    model=self._config.speculative_model,
                    engine="transformers",
                    policy="full_reuse",
                    store=self._config.store,
                    ram_bytes=self._config.ram_bytes,
                    tenant=self._config.tenant,
                    # Its chunks stand behind the same text as the target's, in its own tokens.
                    anchor=self._host.library(self._config).anchor,
                    engine_options={"trust_remote_code": bool(self._config.engine_options.get("trust_remote_code"))},
                )
                host = EngineHost.acquire(config)
                try:
                    self._companion = host, host.library(config)
                except BaseException:
                    host.release()
                    raise
            return self._companion


def _fitting(library: ChunkLibrary, texts: Sequence[str]) -> list[Chunk]:
    """The distinct chunks of texts that the library of the target has taken already."""
    chunks: dict[ChunkKey, Chunk] = {}
    for text in texts:
        try:
            chunk = library.chunk(text)
        except ChunkTooLong as error:
            logger.warning("not warmed for the speculative model: %s", error)
        else:
            chunks[chunk.key] = chunk
    return list(chunks.values())


def _no_speculative_model() -> ConfigurationError:
    return ConfigurationError(
        "The policy asks the speculative model, and none is configured.",
        hint="Pass speculative_model=..., or a policy that needs none (epic, cacheblend, full_reuse, random).",
    )
