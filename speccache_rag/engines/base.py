"""`Engine`: the protocol of an inference engine that captures chunk KV and serves prompts over it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.fingerprint import model_fingerprint
from speccache_rag.scoring.questions import TargetQuestion
from speccache_rag.types import Chunk, ChunkKey


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
    kind: str = ""
    """The kind of exact KV that it leaves in the engine's prefix cache: its tenant's own (`exact_kind`)."""


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """A captured chunk and its stored size."""

    key: ChunkKey
    n_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReuseOutcome:
    """What an engine found and spent when it carried out a plan; `ReusePlan.counts` makes token counts of it."""

    cached_tokens: int = 0
    """Prompt tokens, anywhere, held by the engine's own prefix cache."""
    missed_keys: tuple[str, ...] = ()
    """Chunks that the plan has as stored, and whose KV was gone or unusable."""
    load_s: float = 0.0
    load_hidden_s: float = 0.0
    """Loading that was done before this request needed it; no part of `load_s`."""
    recompute_s: float = 0.0
    fault: str | None = None
    """Why the plan could not be carried out, and the whole prompt was computed instead; None where it was."""


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
    """An inference engine with chunk KV. Its coroutines run on the event loop that awaited `start`."""

    facts: ModelFacts

    async def start(self) -> None:
        """Load the model and prove that reuse is right on it.

        Raises:
            EngineStartError, UnsupportedModel, SelfCheckFailed: see their messages.
        """
        ...

    async def capture(self, request: CaptureRequest) -> CaptureResult:
        """Compute and store one chunk's KV; callers run many at once, the engine batches them.

        It is background work: whoever waits for an answer goes first.

        Raises:
            StoreBusy: too much waits to be written; trying again later is right.
            StoreUnavailable: the KV could not be written.
        """
        ...

    def generate(self, plan: ReusePlan, sampling: Mapping[str, Any]) -> AsyncGenerator[EngineDelta, None]:
        """Serve a prompt as planned; closing the iterator frees the request.

        Args:
            plan: the prompt, and what is reused of it.
            sampling: vLLM `SamplingParams` names: max_tokens, temperature, stop, seed, ...
        """
        ...

    async def ask(self, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
        """float32 [T]: the answer to a question about a prompt (scoring/questions.py), from its stored chunks' KV.

        NaN where the question says nothing about a token. What the plan recomputes is not looked at.

        Raises:
            ConfigurationError: the model cannot be asked that.
            EngineError: the question failed; no other request is harmed.
        """
        ...

    def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store. Any thread may call; it does not wait.

        May err: a chunk that is not there after all is missed when it is loaded, and its tokens are computed.
        """
        ...

    async def stored(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store; asks where it is kept, so that it does not err."""
        ...

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the KV of chunks, from memory too.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        ...

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to read stored KV into memory. Any thread may call; it returns at once."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the engine's own prefix cache (for measurements); stored chunk KV stays."""
        ...

    def close(self) -> None:
        """Stop the engine and everything it started. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """One prefill, asked for every token of an answer that it was given."""

    followed_ids: tuple[int, ...]
    """The given answer, or its own where none was given; the token that ends an answer is part of it."""
    logits: torch.Tensor
    """float32 [A, V] on the CPU: what the model says in the place of each of `followed_ids`, after those before."""
    own_ids: tuple[int, ...]
    """The answer that this prefill gives by itself, greedily."""
    own_text: str
    nll: float | None = None
    """Negative log likelihood of a third answer, mean over its tokens, in nats; None where none was given."""


@runtime_checkable
class FollowingEngine(Engine, Protocol):
    """An engine that also gives logits over the whole vocabulary, which comparisons of prefills need."""

    async def follow(
        self,
        plan: ReusePlan,
        answer_ids: Sequence[int] | None = None,
        *,
        max_new_tokens: int = 16,
        likelihood_of: Sequence[int] = (),
    ) -> Followed:
        """A prompt's own greedy answer, and its logits along a given one (teacher forcing).

        Args:
            plan: the prompt, and what is reused of it.
            answer_ids: the answer to follow, at least one token; None follows the prompt's own.
            max_new_tokens: the most tokens of an own answer.
            likelihood_of: another answer, typically the right one, whose likelihood is wanted.
        """
        ...
