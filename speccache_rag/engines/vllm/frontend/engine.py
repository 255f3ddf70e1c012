"""The vLLM engine: starts stock vLLM with our connector, proves that reuse is right on it, serves requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput, tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from speccache_rag.engines.base import CaptureRequest, CaptureResult, EngineDelta, ModelFacts, ReuseOutcome
from speccache_rag.engines.reuse.deviation import check_layer
from speccache_rag.engines.reuse.plan import ReusePlan, salt_of
from speccache_rag.engines.reuse.selfcheck import probe_ids
from speccache_rag.engines.vllm.frontend.capture_results import CaptureResults
from speccache_rag.engines.vllm.frontend.environment import vllm_environment
from speccache_rag.engines.vllm.frontend.options import engine_args, sampling_params
from speccache_rag.engines.vllm.frontend.presence import Presence
from speccache_rag.engines.vllm.frontend.start_errors import check_process, explained
from speccache_rag.engines.vllm.messages import PARAM, CapturePlan, reuse_params
from speccache_rag.engines.vllm.support import check_config
from speccache_rag.errors import ConfigurationError, EngineClosed, EngineError, EngineStartError, SpecCacheError
from speccache_rag.fingerprint import config_changes
from speccache_rag.scoring.questions import KVDeviation, TargetQuestion
from speccache_rag.store.factory import build_disk
from speccache_rag.types import ChunkKey

logger = logging.getLogger(__name__)

SHUTDOWN_S = 60.0
"""Seconds vLLM's processes get to end by themselves. They need 2 to 5; what hangs is killed after this."""


class VllmEngine:
    """`Engine` over vLLM's `AsyncLLM`. Its coroutines belong to the event loop that awaited `start`."""

    def __init__(self, model: Path, options: dict[str, Any], store: dict[str, Any]) -> None:
        """Check everything that can be checked without loading the model.

        Args:
            model: a local model folder.
            options: vLLM `AsyncEngineArgs` by name.
            store: options of `store.factory.build_store`; the worker process opens it too.

        Raises:
            UnsupportedModel, ConfigurationError, EngineStartError: see their messages.
        """
        args = engine_args(model, options, store)
        try:
            self._config: VllmConfig = args.create_engine_config()
        except (ValueError, RuntimeError, OSError) as error:
            raise EngineStartError(f"vLLM refuses the configuration of {model}: {error}", hint="") from error
        check_process()  # vLLM has chosen by now how it makes processes
        check_config(self._config)
        self.facts = _facts(model, self._config)
        self._log_stats = not args.disable_log_stats
        self._presence = Presence(build_disk(store["path"]))
        self._captures = CaptureResults(lambda tags: self._rpc("speccache_take_captures", tags))
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
        self._llm: AsyncLLM | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the model and run the self-check.

        Raises:
            EngineStartError, UnsupportedModel, SelfCheckFailed: see their messages.
        """
        self._loop = asyncio.get_running_loop()
        with explained(), vllm_environment():
            self._llm = AsyncLLM.from_vllm_config(self._config, disable_log_stats=not self._log_stats)
        try:
            await self._rpc("speccache_attach")
            ids = probe_ids(self._config.model_config.get_vocab_size(), self.facts.max_model_len)
            await self._run_capture(CapturePlan("probe", 0, len(ids), self._tag(), probe=True), ids, None)
            await self._rpc("speccache_self_check", ids)
            await self.reset_prefix_cache()
        except BaseException:
            self.close()
            raise

    async def capture(self, request: CaptureRequest) -> CaptureResult:
        """Compute and store one chunk's KV.

        Raises:
            StoreUnavailable: it could not be written.
            EngineError: the capture did not complete.
        """
        chunk, anchor = request.chunk, request.anchor_ids
        plan = CapturePlan(str(chunk.key), len(anchor), chunk.n_tokens, self._tag())
        await self._run_capture(plan, [*anchor, *chunk.token_ids], salt_of(request.kind))
        nbytes = await self._captures.result(plan.tag)
        self._presence.add(chunk.key)
        return CaptureResult(chunk.key, chunk.n_tokens, nbytes)

    async def generate(self, plan: ReusePlan, sampling: Mapping[str, Any]) -> AsyncGenerator[EngineDelta, None]:
        """Serve a prompt; closing the iterator aborts the request.

        Raises:
            ConfigurationError: bad sampling options.
            EngineError: vLLM failed.
        """
        params = sampling_params(sampling, reuse_params(plan) if plan.stored else None)
        stream = self._alive().generate(_prompt(plan.token_ids, plan.salt), params, self._tag())
        try:
            with _vllm_errors():
                async for output in stream:
                    yield self._delta(output)
        finally:
            await stream.aclose()

    async def ask(self, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
        """float32 [T]: the answer to a question about a prompt (scoring/questions.py).

        A question is a request under a salt of its own: its blocks serve as scratch memory, and what is left in them is
        never found again.

        Raises:
            ConfigurationError: the model has no such layer.
            EngineError: the question failed.
        """
        if isinstance(question, KVDeviation):
            check_layer(question.layer, self._config.model_config.hf_text_config.num_hidden_layers)
        tag = self._tag()
        stored_only = replace(plan, recompute=())
        params = sampling_params({"max_tokens": 1, "temperature": 0.0}, reuse_params(stored_only, question))
        last = await self._run_through(_prompt(plan.token_ids, f"{PARAM}:{tag}"), params, tag)
        found = (last.kv_transfer_params or {}).get(PARAM, {})
        if "answer" not in found:
            raise EngineError(f"{question} failed: {found.get('fault', 'vLLM ended it without an answer.')}")
        return np.frombuffer(found["answer"], dtype="<f4").copy()

    def present(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store, as far as this process knows. Any thread may ask."""
        return self._presence.of(keys)

    async def stored(self, keys: Sequence[ChunkKey]) -> np.ndarray:
        """bool [len(keys)]: whose KV is in the store."""
        return np.array(await self._rpc("speccache_present", list(keys)), dtype=bool)

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Drop the KV of chunks, from the worker's memory too.

        Raises:
            StoreUnavailable: the store cannot be written.
        """
        self._presence.remove(keys)
        _raise(await self._rpc("speccache_forget", list(keys)))

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to read stored KV into the worker's memory. Returns at once; any thread may call."""
        assert self._loop is not None
        if self._presence.on_disk and keys:
            self._loop.call_soon_threadsafe(self._prefetch_soon, list(keys))

    def _prefetch_soon(self, keys: list[ChunkKey]) -> None:
        # Not awaited: vLLM answers between two steps only, and the request that follows comes behind it anyway.
        task = asyncio.ensure_future(self._prefetch(keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prefetch(self, keys: list[ChunkKey]) -> None:
        try:
            await self._rpc("speccache_prefetch", keys)
        except EngineError as error:
            logger.warning("chunks were not prefetched: %s", error)  # the request itself will meet it

    async def reset_prefix_cache(self) -> None:
        """Forget vLLM's own prefix cache."""
        if not await self._alive().reset_prefix_cache():
            raise EngineError("vLLM's prefix cache is in use.", hint="Wait until no request runs.")

    def close(self) -> None:
        """Stop vLLM and its processes. Idempotent."""
        self._closed = True
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # vLLM's default of 5 s is less than two processes need to end on a busy machine, and a process that is
            # killed leaves its shared memory behind.
            llm.shutdown(timeout=SHUTDOWN_S)
        self._presence.close()

    # Inside.

    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineClosed("The engine was closed." if self._closed else "The engine was not started.")
        return self._llm

    def _tag(self) -> str:
        return f"speccache-{next(self._numbers)}"

    async def _rpc(self, method: str, *args: Any) -> Any:
        """Call every rank. Their answer is rank 0's; an error of any rank is raised."""
        with _vllm_errors():
            answers = await self._alive().collective_rpc(method, args=args)
        for answer in answers:
            _raise(answer)
        return answers[0]

    async def _run_capture(self, plan: CapturePlan, token_ids: Sequence[int], salt: str | None) -> None:
        params = sampling_params({"max_tokens": 1, "temperature": 0.0}, plan.to_params())
        # A row that vLLM's prefix cache serves is never written again, and so could not be recorded.
        params.skip_reading_prefix_cache = True
        await self._run_through(_prompt(token_ids, salt), params, plan.tag)

    async def _run_through(self, prompt: TokensInput, params: SamplingParams, tag: str) -> RequestOutput:
        """Run a request for what the worker does on its way. Returns its last output."""
        with _vllm_errors():
            outputs = [output async for output in self._alive().generate(prompt, params, tag)]
        return outputs[-1]

    def _delta(self, output: RequestOutput) -> EngineDelta:
        answer = output.outputs[0]
        outcome = self._outcome(output) if output.finished else None
        logprobs = None
        if answer.logprobs is not None:
            logprobs = [{i: entry.logprob for i, entry in token.items()} for token in answer.logprobs]
        ids = tuple(answer.token_ids)
        return EngineDelta(answer.text, len(ids), output.finished, answer.finish_reason, outcome, logprobs, ids)

    def _outcome(self, output: RequestOutput) -> ReuseOutcome:
        found = (output.kv_transfer_params or {}).get(PARAM)
        if found is None:
            # Nothing was filled: all that was not computed came from vLLM's own prefix cache.
            return ReuseOutcome(cached_tokens=output.num_cached_tokens or 0)
        if "fault" in found:
            return ReuseOutcome(fault=found["fault"])
        self._presence.remove(found["missed_keys"])
        return ReuseOutcome(**{**found, "missed_keys": tuple(found["missed_keys"])})


def _prompt(token_ids: Sequence[int], salt: str | None) -> TokensInput:
    """A prompt in the shape that vLLM's own renderer gives it."""
    return tokens_input(list(token_ids), cache_salt=salt)


@contextmanager
def _vllm_errors() -> Iterator[None]:
    """vLLM's errors as ours."""
    try:
        yield
    except VLLMClientError as error:
        raise ConfigurationError(f"vLLM refuses this request: {error}", hint="") from error
    except EngineGenerateError as error:
        raise EngineError(f"vLLM could not serve this request: {error.__cause__!r}") from error
    except EngineDeadError as error:
        raise EngineError("vLLM's engine process died.", hint="Its log says why. Create a new SpecCache.") from error


def _facts(model: Path, config: VllmConfig) -> ModelFacts:
    settings = config.model_config
    saved = AutoConfig.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    return ModelFacts.of(
        model,
        quantization=settings.quantization,
        dtype=settings.dtype,
        rope=getattr(settings.hf_text_config, "rope_parameters", None),
        max_model_len=int(settings.max_model_len),
        changes=config_changes(settings.hf_config.to_dict(), saved.to_dict()),
        load_format=str(config.load_config.load_format),
    )


def _raise(answer: Any) -> None:
    """Raise the error that a rank has sent as a value (worker/extension.py)."""
    if isinstance(answer, dict) and "error" in answer:
        raise SpecCacheError.from_dict(answer["error"])
