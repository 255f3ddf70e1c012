"""`SpecCache`: the one class a user learns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.recapture import Recaptures
from speccache_rag.chunks.warming import only_texts, plan_warm, warm_chunks, whole_report
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.base import Followed, FollowingEngine
from speccache_rag.errors import ConfigurationError, EngineClosed, SpecCacheError
from speccache_rag.hosting.doctor import Check, examine
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.plan.call import Call
from speccache_rag.plan.draft import Draft
from speccache_rag.plan.explanation import explanation_of
from speccache_rag.plan.options import CallOptions, PlanOptions, plan_options, split_options
from speccache_rag.plan.planner import Planner
from speccache_rag.plan.prompt_plan import Prompt, PromptPlan
from speccache_rag.plan.report import report_of
from speccache_rag.plan.scoring_models import ScoringModels
from speccache_rag.plan.totals import Counters
from speccache_rag.selection.factory import build_policy
from speccache_rag.types import Chunk, Completion, Delta, Explanation, Usage, WarmReport

logger = logging.getLogger(__name__)


class SpecCache:
    """Generation with chunk KV reuse.

    Cheap to make: the engine starts at first use (or `start()`), and is shared by all `SpecCache` objects of this
    process whose engine options are the same. Use it from any thread and any event loop.

        with SpecCache(model="Qwen/Qwen2.5-7B-Instruct", speculative_model="Qwen/Qwen2.5-0.5B-Instruct") as sc:
            sc.warm(chunks)
            answer = sc.generate(prompt_that_contains_some_of_them)

    Args:
        **options: fields of `SpecCacheConfig`.

    Raises:
        ConfigurationError: an option is unknown or out of range.
    """

    def __init__(self, **options: Any) -> None:
        self.config = SpecCacheConfig.build(**options)
        policy = build_policy(self.config.policy, self.config.policy_options)
        if policy.needs_speculative_model and self.config.speculative_model is None:
            raise ConfigurationError(
                f"Policy {self.config.policy!r} scores tokens with a speculative model, and none is configured.",
                hint="Pass speculative_model=..., or a policy that needs none, such as the default, policy='epic'.",
            )
        host = EngineHost.acquire(self.config)
        self._host: EngineHost | None = host
        self._models = ScoringModels(host, self.config)
        self._planner = Planner(host, self.config, policy, self._models)
        self._counters = Counters()
        self._recaptures = Recaptures(self._capture, self._counters.add_recapture, self.config.admission)
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: SpecCacheConfig | str | Path) -> Self:
        """A `SpecCache` with these options, or those in a TOML file (`SpecCacheConfig.load`)."""
        loaded = config if isinstance(config, SpecCacheConfig) else SpecCacheConfig.load(config)
        return cls(**loaded.model_dump())

    @classmethod
    def shared(cls, config: SpecCacheConfig) -> SpecCache:
        """One object per process and configuration, for frameworks that copy and re-create their LLM objects."""
        key = json.dumps(config.model_dump(), sort_keys=True, default=str)
        host = EngineHost.acquire(config)
        try:
            return host.shared(key, lambda: cls.from_config(config), lambda found: not found.closed)
        finally:
            host.release()

    # Frameworks copy and pickle whatever holds a model. A live engine cannot be copied: a copy shares it, and what is
    # unpickled finds its process's own by the configuration.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SpecCache.shared, (self.config,)

    # What it runs on.

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._host is None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target model's tokenizer."""
        return self._open().tokenizer.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and answer may have together. Starts the engine."""
        return self._open().engine.facts.max_model_len

    def start(self) -> Self:
        """Start the engine now: it loads the model and proves that reuse equals prefill on it.

        Raises:
            UnsupportedModel, UnsupportedVersion, EngineStartError, SelfCheckFailed: see their messages.
        """
        _ = self._open().engine
        return self

    # Warm.

    def warm(
        self, texts: Iterable[str], show_progress: bool = True, *, skip_bad: bool = False, pin: bool = False
    ) -> WarmReport:
        """Compute and keep each text's KV (and scores). Skips what is kept already; an interrupted run can be resumed.

        Args:
            texts: of chunks, as prompts will hold them.
            show_progress: whether to show a bar.
            skip_bad: name texts that cannot be chunks in the report, instead of raising an error.
            pin: never evict these chunks from disk.

        Raises:
            EmptyChunk, ChunkTooLong: before any work, if a text cannot be a chunk.
            ConfigurationError: chunks are to be pinned, and there is no store on disk.
            StoreUnavailable: KV could not be written; what was written stays.
        """
        host, library = self._open(), self._library
        planned = plan_warm(library, texts, skip_bad=skip_bad)
        if pin:
            host.inventory.pin([chunk.key for chunk in planned.chunks])
        chunks, scorer, speculative = planned.chunks, host.scorer(self.config), WarmReport()
        with tqdm(total=len(chunks), desc="warm", unit="chunk", disable=not show_progress) as bar:
            report = host.loop.run(warm_chunks(host.engine, library, scorer, chunks, bar.update))
        if self._planner.policy.needs_speculative_kv:
            with tqdm(total=len(chunks), desc="warm speculative", unit="chunk", disable=not show_progress) as bar:
                speculative = self._models.warm([chunk.text for chunk in chunks], bar.update)
        return whole_report(planned, report, speculative)

    async def awarm(
        self, texts: Iterable[str], show_progress: bool = True, *, skip_bad: bool = False, pin: bool = False
    ) -> WarmReport:
        """`warm` for an event loop."""
        return await asyncio.to_thread(self.warm, texts, show_progress, skip_bad=skip_bad, pin=pin)

    def forget(self, texts_or_keys: Iterable[str]) -> int:
        """Leave neither text nor KV of these chunks of this tenant in the store; returns how many were known."""
        host = self._open()
        keys = host.inventory.keys_of(only_texts(texts_or_keys), self.config.tenant or "")
        host.inventory.forget(keys)
        if host.running:
            host.loop.run(host.engine.forget(keys))
        return len(keys)

    def prefetch(self, texts: Iterable[str]) -> None:
        """Tell which chunks a prompt will soon hold, typically what a retriever just returned. Returns at once.

        Stored KV is read into memory while the prompt is still being made. Texts not seen before become known: the
        first prompt that holds one computes it, and its KV is captured afterwards. Texts that cannot be chunks are
        passed over. Before the engine runs, texts are kept for its start.

        Raises:
            PromptError: one text was given instead of several, or something that is no text.
        """
        # Where texts wait already, a thread is about to take them all.
        if self._planner.prefetches.put(texts) and self._open().running:
            threading.Thread(target=self._prefetch_now, name="speccache-prefetch", daemon=True).start()

    # Plan and generate.

    def plan(self, prompt: Prompt, **options: Unpack[PlanOptions]) -> PromptPlan:
        """What would be done to a prompt: what is loaded, recomputed and computed fresh, and why. Generates nothing.

        Args:
            prompt: text, used as it is, or chat messages, rendered with the model's chat template.
            **options: for this call, in place of the configured ones (`PlanOptions`).

        Raises:
            PromptError: the prompt cannot be served (too long, no chat template, ...).
            ConfigurationError: an option is unknown or out of range.
            EngineError: a question of the policy failed.
        """
        host = self._host_running()
        begun = self._planner.begin(prompt, plan_options(options), time.perf_counter())
        return host.loop.run(self._planner.finish(begun)) if isinstance(begun, Draft) else begun

    async def aplan(self, prompt: Prompt, **options: Unpack[PlanOptions]) -> PromptPlan:
        """`plan` for an event loop."""
        host = await self._ahost_running()
        begun = await asyncio.to_thread(self._planner.begin, prompt, plan_options(options), time.perf_counter())
        return await host.loop.run_from_loop(self._planner.finish(begun)) if isinstance(begun, Draft) else begun

    def explain(self, prompt: Prompt, **options: Unpack[PlanOptions]) -> Explanation:
        """What would be loaded, recomputed and computed fresh, token by token; generates nothing."""
        return explanation_of(self.plan(prompt, **options))

    def generate(self, prompt: Prompt | PromptPlan, **options: Unpack[CallOptions]) -> Completion:
        """Answer a prompt.

        Args:
            prompt: as `plan` takes it, or a plan that it made.
            **options: for this call (`CallOptions`): those of `plan`, all vLLM `SamplingParams` by name, `timeout` in
                seconds; for messages also `tools` and `tool_choice` in OpenAI's shapes, `parallel_tool_calls`, and
                `chat_template_kwargs` for the chat template.

        Raises:
            PromptError: the prompt cannot be served (too long, no chat template, ...).
            ConfigurationError: an option is unknown or out of range.
            RequestTimeout: the answer took longer than `timeout`.
            EngineError: the engine failed.
        """
        return _last(list(self.stream(prompt, **options)))

    def stream(self, prompt: Prompt | PromptPlan, **options: Unpack[CallOptions]) -> Generator[Delta, None, None]:
        """Like `generate`, piece by piece. Nothing runs before the first `next`; closing it frees the request."""
        host = self._host_running()
        started = time.perf_counter()
        begun = self._begin(prompt, options, started)
        yield from host.loop.iterate(lambda: self._serve(*begun))

    async def agenerate(self, prompt: Prompt | PromptPlan, **options: Unpack[CallOptions]) -> Completion:
        """`generate` for an event loop."""
        return _last([delta async for delta in self.astream(prompt, **options)])

    async def astream(self, prompt: Prompt | PromptPlan, **options: Unpack[CallOptions]) -> AsyncGenerator[Delta, None]:
        """`stream` for an event loop."""
        host = await self._ahost_running()
        started = time.perf_counter()
        begun = await asyncio.to_thread(self._begin, prompt, options, started)
        async with contextlib.aclosing(host.loop.aiterate(lambda: self._serve(*begun))) as deltas:
            async for delta in deltas:
                yield delta

    def follow(
        self,
        plan: PromptPlan,
        answer_ids: Sequence[int] | None = None,
        *,
        max_new_tokens: int = 16,
        likelihood_of: Sequence[int] = (),
    ) -> Followed:
        """A planned prompt's own greedy answer, and its logits along a given one (see `FollowingEngine`).

        Raises:
            ConfigurationError: the engine does not give logits over the whole vocabulary.
        """
        host = self._host_running()
        if not isinstance(host.engine, FollowingEngine):
            raise ConfigurationError(
                f"engine {self.config.engine!r} gives no logits over the whole vocabulary.",
                hint="Pass engine='transformers'.",
            )
        engine = host.engine
        return host.loop.run(
            engine.follow(plan.reuse, answer_ids, max_new_tokens=max_new_tokens, likelihood_of=likelihood_of)
        )

    # The state it is in.

    def some_chunks(self, most: int) -> list[Chunk]:
        """Up to so many of the known chunks. Starts the engine."""
        return self._library.some(most)

    def stats(self) -> dict[str, Any]:
        """Totals since this object was made, and the number of known chunks if the engine runs."""
        known = len(self._library) if self._open().running else None
        return {**self._counters.to_dict(), "known_chunks": known}

    def doctor(self) -> list[Check]:
        """Check versions, models, store and engine. Starts the engine."""
        return examine(self.config, self._open())

    def reset_prefix_cache(self) -> None:
        """Forget vLLM's own prefix cache, for cold measurements; stored chunk KV stays."""
        host = self._open()
        host.loop.run(host.engine.reset_prefix_cache())

    # Closing.

    def close(self) -> None:
        """Stop using the engine; the last user stops it. Idempotent."""
        with self._lock:
            host, self._host = self._host, None
        if host is not None:
            self._models.close()
            host.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Helpers.

    def _open(self) -> EngineHost:
        if self._host is None:
            raise EngineClosed("This SpecCache was closed.")
        return self._host

    def _host_running(self) -> EngineHost:
        """The host, its engine running; starts it, which is no part of a request's time."""
        host = self._open()
        _ = host.engine
        return host

    async def _ahost_running(self) -> EngineHost:
        host = self._open()
        return host if host.running else await asyncio.to_thread(self._host_running)

    @property
    def _library(self) -> ChunkLibrary:
        return self._open().library(self.config)

    def _prefetch_now(self) -> None:
        try:
            self._planner.learn_prefetched()
        except EngineClosed:
            logger.debug("closed while chunks were prefetched")
        except SpecCacheError as error:
            logger.warning("chunks were not prefetched: %s", error)

    async def _serve(self, call: Call, begun: Draft | PromptPlan) -> AsyncGenerator[Delta, None]:
        """The answer to a call. Runs on the engine's loop."""
        plan = await self._planner.finish(begun) if isinstance(begun, Draft) else begun
        async with contextlib.aclosing(call.answer(self._deltas(plan, call.sampling), plan.reuse.token_ids)) as deltas:
            async for delta in deltas:
                yield delta

    def _begin(
        self, prompt: Prompt | PromptPlan, options: Mapping[str, Any], started: float
    ) -> tuple[Call, Draft | PromptPlan]:
        """The part of a call that computes in this process: for the caller's thread, or one beside its event loop."""
        planned, others = split_options(options)
        if isinstance(prompt, PromptPlan):
            if planned:
                raise ConfigurationError(f"{', '.join(planned)} given, and the prompt is planned already.", hint="")
            call = Call.of(prompt.asked, others, self.config, self.tokenizer, started)
            return call, replace(prompt, started=started, score_s=0.0, align_s=0.0)
        call = Call.of(prompt, others, self.config, self.tokenizer, started)
        return call, self._planner.begin(call.prompt, planned, started)

    async def _deltas(self, plan: PromptPlan, sampling: Mapping[str, Any]) -> AsyncGenerator[Delta, None]:
        """The engine's answer to a planned prompt; the last delta carries report and usage."""
        text, n_new, ttft_s = "", 0, 0.0
        token_ids: tuple[int, ...] = ()
        logprobs: list[Mapping[int, float]] = []
        async with contextlib.aclosing(self._open().engine.generate(plan.reuse, sampling)) as pieces:
            async for piece in pieces:
                if n_new == 0 and piece.n_new_tokens:
                    ttft_s = time.perf_counter() - plan.started
                text += piece.text
                n_new += piece.n_new_tokens
                token_ids += tuple(piece.token_ids)
                logprobs += piece.logprobs or []
                completion = None
                if piece.outcome is not None:
                    report = report_of(plan, piece.outcome, ttft_s)
                    self._counters.add_report(report)
                    usage = Usage(report.prompt_tokens, n_new, report.cached_tokens + report.loaded_tokens)
                    completion = Completion(text, report, usage, piece.finish_reason, logprobs or None)
                    placed = {p.chunk.key: p.chunk for p in plan.prompt.placements}
                    self._recaptures.begin(chunk for key, chunk in placed.items() if key in report.missed_keys)
                if piece.text or completion is not None:
                    yield Delta(piece.text, completion, token_ids=token_ids)
                    token_ids = ()

    async def _capture(self, chunk: Chunk) -> None:
        await warm_chunks(self._open().engine, self._library, None, [chunk])


def _last(deltas: Sequence[Delta]) -> Completion:
    completion = deltas[-1].completion
    assert completion is not None
    return completion
