"""The models that answer a policy's questions: the target, and the speculative model with chunk KV of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.warming import warm_chunks
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ChunkTooLong, ConfigurationError, EngineClosed
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.scoring.alignment import align_scores
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.scoring.layers import LayerRange
from speccache_rag.scoring.questions import KVDeviation, QueryAttention
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKey, WarmReport

logger = logging.getLogger(__name__)


class MissingKV(Exception):
    """The speculative model has no KV of a chunk, or no room for the prompt.

    The chunk was warmed for another policy, before the model was configured, or is too long for it.
    """


class ScoringModels:
    """What a `PromptProbe` asks. Engines start when first asked; `close` gives them up."""

    def __init__(self, host: EngineHost, config: SpecCacheConfig) -> None:
        self._host = host
        self._config = config
        self._lock = threading.Lock()
        self._companion: tuple[EngineHost, ChunkLibrary] | None = None
        self._closed = False

    def scorer(self, layers: LayerRange) -> SpeculativeScorer:
        """The speculative model as a scorer of importance.

        Raises:
            ConfigurationError: no speculative model is configured.
        """
        found = self._host.scorer(self._config, layers)
        if found is None:
            raise _no_speculative_model()
        return found

    def kv_deviation(self, prompt: AssembledPrompt, question: KVDeviation) -> np.ndarray:
        """float32 [T], by the target (see scoring/questions.py)."""
        return self._host.loop.run(self._host.engine.kv_deviation(prompt, question.layer, question.of))

    def query_attention(self, prompt: AssembledPrompt, question: QueryAttention) -> np.ndarray:
        """float32 [T], by either model (see scoring/questions.py).

        Raises:
            ConfigurationError: the scorer is "speculative" and none is configured.
            MissingKV: it is, and has no KV of some chunk.
        """
        layers = question.layers
        if question.scorer == "target":
            return self._host.loop.run(self._host.engine.query_attention(prompt, layers))
        host, library = self._speculative()
        matches = library.match(prompt.text)
        own = host.tokenizer.assemble(prompt.text, matches)
        if own.n_tokens > host.engine.facts.max_model_len:
            raise MissingKV
        keys = [match.chunk.key for match in matches]
        known = {match.chunk.text for match in matches}
        if any(placement.chunk.text not in known for placement in prompt.placements) or not all(
            host.loop.run(host.engine.present(keys))
        ):
            raise MissingKV
        host.loop.run(host.engine.prefetch(keys))
        attention = host.loop.run(host.engine.query_attention(own, layers))
        return align_scores(own.offsets, attention, prompt.offsets)

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
