"""The Transformers engine: the model in this process, on one thread of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, DynamicCache

from speccache_rag.engines.base import CaptureRequest, CaptureResult, EngineDelta, Followed, ModelFacts
from speccache_rag.engines.reuse.deviation import check_layer
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.reuse.selfcheck import TOLERANCE
from speccache_rag.engines.transformers.cache import chunk_kv
from speccache_rag.engines.transformers.following import follow
from speccache_rag.engines.transformers.generation import Generation
from speccache_rag.engines.transformers.header import Header
from speccache_rag.engines.transformers.kv_deviation import kv_deviation
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.model_thread import ModelThread
from speccache_rag.engines.transformers.options import EngineOptions, checked, resolve_device
from speccache_rag.engines.transformers.query_attention import query_attention
from speccache_rag.engines.transformers.sampling import SamplingOptions
from speccache_rag.engines.transformers.selfcheck import self_check
from speccache_rag.engines.transformers.support import check_config
from speccache_rag.errors import ConfigurationError, EngineClosed, EngineStartError, StoreBusy, StoreError
from speccache_rag.prompt.loading import load_tokenizer, remote_code_error
from speccache_rag.scoring.questions import KVDeviation, TargetQuestion
from speccache_rag.store.factory import build_store
from speccache_rag.types import ChunkKey, ChunkKV

T = TypeVar("T")

SLICE, SLICE_BESIDE_ANSWERS = 128, 16
"""Tokens of a capture computed at once: what a request that arrives, or an answer's next token, waits for."""


class TransformersEngine:
    """`Engine` over a Transformers causal language model.

    All model work runs on one thread, one step at a time: a prefill, a token, a slice of a capture. The event loop
    stays free, and requests that run together take turns, a token each; they are not batched. Captures run in slices,
    between tokens. It has no prefix cache of its own.

    Chunk KV is a property of model, dtype, RoPE, anchor and tokens, not of who computed it: keys are the vLLM engine's,
    and a store warmed by one engine serves the other.
    """

    def __init__(self, model: Path, options: dict[str, Any], store: dict[str, Any]) -> None:
        """Check everything that can be checked without loading the weights.

        Args:
            model: a local model folder.
            options: `EngineOptions` by name.
            store: options of `store.factory.build_store`.

        Raises:
            UnsupportedModel, ConfigurationError, EngineStartError: see their messages.
        """
        self._path = model
        self._options = checked(EngineOptions, "engine", options)
        self._device = resolve_device(self._options.device)
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=self._options.trust_remote_code)
        except (OSError, ValueError) as error:
            raise remote_code_error(model, error) or EngineStartError(
                f"Transformers cannot read the config of {str(model)!r}: {error}", hint=""
            ) from error
        check_config(str(model), config)
        self._dtype = _dtype(self._options, config)
        self.facts = _facts(model, config, self._dtype, _max_model_len(self._options, config))
        self._store = build_store(store)
        self._thread = ModelThread("speccache-transformers")
        self._answering = 0
        self._header = Header()
        self._target: TargetModel | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model and run the self-check.

        Raises:
            EngineStartError, UnsupportedModel, SelfCheckFailed: see their messages.
        """
        try:
            self._target = await self._run(self._load)
        except BaseException:
            self.close()
            raise

    def _load(self) -> TargetModel:
        target = TargetModel.load(
            self._path,
            device=self._device,
            dtype=self._dtype,
            max_model_len=self.facts.max_model_len,
            attn_implementation=self._options.attn_implementation,
            tokenizer=load_tokenizer(self._path, self._options.model_dump()),
            trust_remote_code=self._options.trust_remote_code,
        )
        self_check(target)
        return target

    async def capture(self, request: CaptureRequest) -> CaptureResult:
        """Compute and store one chunk's KV.

        Raises:
            StoreUnavailable: it could not be written.
        """
        target, chunk, n_anchor = self._alive(), request.chunk, len(request.anchor_ids)
        token_ids = [*request.anchor_ids, *chunk.token_ids]
        cache = DynamicCache()
        at = 0
        while at < len(token_ids):
            width = SLICE_BESIDE_ANSWERS if self._answering else SLICE
            piece, start = token_ids[at : at + width], at
            await self._run(functools.partial(target.extend, piece, start, cache), background=True)
            at += len(piece)
        kv = await self._run(lambda: chunk_kv(cache, chunk.token_ids, start=n_anchor), background=True)
        return CaptureResult(chunk.key, chunk.n_tokens, await self._stored(chunk.key, kv))

    async def _stored(self, key: ChunkKey, kv: ChunkKV) -> int:
        """The stored size of KV that the store's own threads write."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[int | StoreError] = loop.create_future()

        def settle(result: int | StoreError) -> None:
            if not told.done():  # nobody waits any more
                told.set_result(result)

        def done(result: int | StoreError) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle, result)

        if not self._store.put_soon(key, kv, done):
            raise StoreBusy(f"Chunk {key[:12]} was dropped: too many captures wait to be written.")
        result = await told
        if isinstance(result, StoreError):
            raise result
        return result

    async def generate(self, plan: ReusePlan, sampling: Mapping[str, Any]) -> AsyncGenerator[EngineDelta, None]:
        """Serve a prompt as planned; closing the iterator ends the work with the step that runs.

        Raises:
            ConfigurationError: bad sampling options.
            PromptError: the prompt is empty or too long.
        """
        options = checked(SamplingOptions, "sampling", sampling)
        generation = Generation(self._alive(), self._store, plan, options)
        finished = False
        self._answering += 1
        try:
            while not finished:
                delta = await self._run(generation.step)
                finished = delta.finished
                yield delta
        finally:
            self._answering -= 1

    async def follow(
        self,
        plan: ReusePlan,
        answer_ids: Sequence[int] | None = None,
        *,
        max_new_tokens: int = 16,
        likelihood_of: Sequence[int] = (),
    ) -> Followed:
        """A prompt's own answer and its logits along a given one (see `FollowingEngine`)."""
        target, store = self._alive(), self._store
        return await self._run(lambda: follow(target, store, plan, answer_ids, max_new_tokens, likelihood_of))

    async def ask(self, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
        """float32 [T]: the answer to a question about a prompt.

        Raises:
            ConfigurationError: the model has no such layer.
        """
        target, store = self._alive(), self._store
        if isinstance(question, KVDeviation):
            deviation = question
            check_layer(deviation.layer, target.shape.n_layers)
            return await self._run(lambda: kv_deviation(target, store, plan, deviation))
        attention = question
        return await self._run(lambda: query_attention(target, store, plan, attention, self._header))

    def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store."""
        return np.array([self._store.contains(key) for key in keys], dtype=bool)

    async def stored(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store."""
        return await asyncio.to_thread(self.present, keys)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the KV of chunks.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        await asyncio.to_thread(self._store.delete_many, keys)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to read stored KV into memory, on threads of the store."""
        self._alive()
        self._store.request(keys)

    async def reset_prefix_cache(self) -> None:
        """Nothing to forget: there is no prefix cache."""
        self._alive()

    def close(self) -> None:
        """Give up model and store once the step that runs is done. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._target = None
        # On the engine's thread, behind the step that may be using it; nobody waits for that.
        try:
            self._thread.submit(self._store.close)
        except RuntimeError:  # at the interpreter's end, which joins such threads before it calls anybody
            self._store.close()
        self._thread.shutdown()

    # Helpers.

    def _alive(self) -> TargetModel:
        if self._target is None:
            raise EngineClosed("The engine was closed." if self._closed else "The engine was not started.")
        return self._target

    async def _run(self, work: Callable[[], T], *, background: bool = False) -> T:
        if self._closed:
            raise EngineClosed("The engine was closed.")
        return await asyncio.wrap_future(self._thread.submit(work, background=background))


def _dtype(options: EngineOptions, config: Any) -> torch.dtype:
    text = config.get_text_config(decoder=True)
    saved = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    dtype = saved if options.dtype == "auto" else getattr(torch, options.dtype)
    if dtype not in TOLERANCE:
        raise ConfigurationError(
            f"The weights were saved as {dtype}, in which reuse is not proved.",
            hint="Set dtype in engine_options: 'float32', 'bfloat16' or 'float16'.",
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(options: EngineOptions, config: Any) -> int:
    text = config.get_text_config(decoder=True)
    rope = text.rope_parameters
    limit = int(text.max_position_embeddings)
    if rope.get("rope_type") == "yarn" and "original_max_position_embeddings" in rope:
        # A config may name the trained length only, and leave what YaRN makes of it to be computed.
        limit = max(limit, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ConfigurationError(
            f"max_model_len is {options.max_model_len}; the model's own limit is {limit}.",
            hint="Lower it, or leave it out.",
        )
    return options.max_model_len or limit


def _facts(model: Path, config: Any, dtype: torch.dtype, max_model_len: int) -> ModelFacts:
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    rope = config.get_text_config(decoder=True).rope_parameters
    return ModelFacts.of(model, quantization=method, dtype=dtype, rope=rope, max_model_len=max_model_len)
