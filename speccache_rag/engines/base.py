"""What an engine must do: capture chunk KV, and serve a prompt whose chunks have stored KV."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from speccache_rag.fingerprint import model_fingerprint
from speccache_rag.scoring.layers import LayerRange
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKey, Selection


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the loaded target model is; everything its KV depends on is in here or in the key of a chunk."""

    fingerprint: str
    """Digest of config, tokenizer, weights and quantization."""
    dtype: str
    rope: str
    """RoPE parameters as canonical JSON."""
    max_model_len: int
    """Tokens, prompt and answer together."""

    @classmethod
    def of(
        cls,
        model: Path,
        *,
        quantization: object,
        dtype: object,
        rope: object,
        max_model_len: int,
        changes: str = "",
        load_format: str = "auto",
    ) -> ModelFacts:
        """The facts of a model folder as an engine loads it.

        Made here and nowhere else, because a store warmed by one engine serves the other only if both spell them alike.

        Args:
            model: the folder.
            quantization: the method's name, or None.
            dtype: of the computation.
            rope: RoPE parameters.
            max_model_len: in tokens.
            changes: what runs instead of what the folder's config says (`fingerprint.config_changes`).
            load_format: how weights are read; all but the usual ways may give other weights.
        """
        parts = [model_fingerprint(model), str(quantization), changes]
        if load_format not in ("auto", "hf", "safetensors"):
            parts.append(load_format)
        return cls(
            fingerprint=":".join(filter(None, parts)),
            dtype=str(dtype).removeprefix("torch."),
            rope=json.dumps(rope, sort_keys=True, default=str),
            max_model_len=max_model_len,
        )


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """Compute a chunk's KV behind the anchor prefix and store it under its key."""

    chunk: Chunk
    anchor_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """A captured chunk and its stored size."""

    key: ChunkKey
    n_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt to serve. `selection` None means plain prefill: nothing is reused."""

    prompt: AssembledPrompt
    selection: Selection | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM `SamplingParams` names: max_tokens, temperature, stop, seed, ..."""


@dataclass(frozen=True, slots=True)
class ReuseOutcome:
    """What the engine did with the reuse region; token counts and seconds."""

    cached_tokens: int = 0
    """Prompt tokens, anywhere, held by the engine's own prefix cache."""
    cached_chunk_tokens: int = 0
    """Those of them that belong to a chunk."""
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    missed_keys: tuple[str, ...] = ()
    load_s: float = 0.0
    load_hidden_s: float = 0.0
    """Loading that was done before this request needed it; no part of `load_s`."""
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """A piece of an answer. The last one has `finished` set and carries `outcome`."""

    text: str
    n_new_tokens: int
    finished: bool = False
    finish_reason: str | None = None
    outcome: ReuseOutcome | None = None
    logprobs: Sequence[Mapping[int, float]] | None = None
    token_ids: Sequence[int] = ()
    """The new tokens."""


class Engine(Protocol):
    """An inference engine with chunk KV. Coroutines run on the engine's own event loop (engines/loop.py)."""

    facts: ModelFacts

    async def start(self) -> None:
        """Load the model and prove that reuse is right on it.

        Raises:
            EngineStartError, UnsupportedModel, SelfCheckFailed: see their messages.
        """
        ...

    async def capture(self, request: CaptureRequest) -> CaptureResult:
        """Compute and store one chunk's KV; callers run many at once, the engine batches them.

        Raises:
            StoreUnavailable: the KV could not be written.
        """
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Serve a prompt; closing the iterator frees the request."""
        ...

    async def kv_deviation(self, prompt: AssembledPrompt, layer: int, of: Literal["value", "key"]) -> np.ndarray:
        """float32 [T]: squared L2 distance of stored from true KV at layer index `layer` (see scoring/questions.py).

        NaN outside chunks, 0 in chunks without stored KV.

        Raises:
            ConfigurationError: the model has no such layer.
        """
        ...

    async def query_attention(self, prompt: AssembledPrompt, layers: LayerRange) -> np.ndarray:
        """float32 [T]: attention of the tokens after the reuse region on each token, over fully reused chunk KV.

        The mean over those tokens of the maximum over heads and counted layers. They are the query; where the prompt
        ends inside its last chunk, the last token stands for it.
        """
        ...

    async def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store."""
        ...

    async def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to read stored KV into memory, and return: what is asked for next is then there, or on its way."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the engine's own prefix cache (for measurements); stored chunk KV stays."""
        ...

    def close(self) -> None:
        """Stop the engine and everything it started. Idempotent."""
        ...
