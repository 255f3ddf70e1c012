"""`Planner`: from a prompt to its plan. It matches, assembles, looks what is stored, asks, and selects."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from speccache_rag.chunks.library import ChunkLibrary
from speccache_rag.chunks.prefetch_queue import PrefetchQueue
from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.reuse.kind import approximate_kind, exact_kind
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.errors import ContextOverflow, PromptError
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.plan.draft import Draft
from speccache_rag.plan.options import PlanOptions
from speccache_rag.plan.placing import Placing, all_computed
from speccache_rag.plan.prompt_plan import Prompt, PromptPlan
from speccache_rag.plan.scoring_models import ScoringModels
from speccache_rag.prompt.chat import Chat
from speccache_rag.prompt.control import Rendered
from speccache_rag.scoring.questions import Importance
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.selection.factory import build_policy
from speccache_rag.types import AssembledPrompt, ChunkKey


class Planner:
    """Plans the prompts of one configuration. Starts the engine."""

    def __init__(
        self, host: EngineHost, config: SpecCacheConfig, policy: SelectionPolicy, models: ScoringModels
    ) -> None:
        self._host = host
        self._config = config
        self._models = models
        self._policies = {config.policy: policy}
        self.policy = policy
        """The configured one."""
        self.prefetches = PrefetchQueue()
        """Texts that prompts will soon hold; the next plan makes them known chunks."""

    def begin(self, prompt: Prompt, options: PlanOptions, started: float) -> PromptPlan | Draft:
        """The plan of a prompt; a draft where its policy asks something that only an engine can answer.

        Takes some milliseconds of computing, so it is not for an event loop.

        Args:
            prompt: text, used as it is, or chat messages.
            options: of this call.
            started: `time.perf_counter()` at the call.

        Raises:
            ContextOverflow: the prompt does not fit in the model's context.
            PromptError, ConfigurationError: see their messages.
        """
        library = self._host.library(self._config)
        self.learn_prefetched()
        config = self._with(options)
        asked = prompt if isinstance(prompt, str | Chat) else Chat.of(prompt, {}, config.chat_template_kwargs)
        assembled = self._assemble(asked, library)
        draft = self._placed(asked, assembled, library, config, started)
        for question in draft.unanswered:
            if isinstance(question, Importance):
                began = time.perf_counter()
                scores = self._models.importance(question, draft.choosable, library, config.scoring)
                draft.take(question, scores, config.scoring, time.perf_counter() - began)
        return draft if draft.unanswered else draft.finish()

    async def finish(self, draft: Draft) -> PromptPlan:
        """The plan of a draft, when the engines have answered. To be awaited on the engine's loop.

        Raises:
            EngineError: a question of the policy failed.
            ConfigurationError: it cannot be asked.
        """
        for question in draft.unanswered:
            began = time.perf_counter()
            answer, scoring = await self._models.ask(question, draft.reuse, draft.prompt)
            draft.take(question, answer, scoring, time.perf_counter() - began)
        return await asyncio.to_thread(draft.finish)

    def learn_prefetched(self) -> None:
        """Make waiting texts known chunks, and begin to read their KV."""
        if keys := self.prefetches.learn(self._host.library(self._config)):
            self._host.engine.prefetch(keys)

    def _with(self, options: PlanOptions) -> SpecCacheConfig:
        """The configuration under which a call is planned."""
        if not options:
            return self._config
        changes: dict[str, Any] = dict(options)
        if options.get("policy", self._config.policy) != self._config.policy:
            changes["policy_options"] = {}  # they are the configured policy's
        return SpecCacheConfig.build(**{**self._config.model_dump(), **changes})

    def _policy(self, name: str) -> SelectionPolicy:
        if name not in self._policies:
            self._policies[name] = build_policy(name)
        return self._policies[name]

    def _assemble(self, asked: str | Chat, library: ChunkLibrary) -> AssembledPrompt:
        """The prompt as token ids, with the known chunks in it."""
        tokenizer, max_model_len = self._host.tokenizer, self._host.engine.facts.max_model_len
        rendered = Rendered(asked) if isinstance(asked, str) else tokenizer.render(asked)
        matches = library.match(rendered.text)
        library.escaped.look(rendered.text, matches)
        assembled = tokenizer.assemble(rendered, matches, add_bos=isinstance(asked, str))
        if not assembled.n_tokens:
            raise PromptError("The prompt is empty.", hint="Pass some text, or at least one message.")
        if assembled.n_tokens >= max_model_len:
            raise ContextOverflow(
                f"The prompt has {assembled.n_tokens} tokens; the model's context is {max_model_len}, one of which the "
                "answer needs."
            )
        return assembled

    def _placed(
        self,
        asked: str | Chat,
        prompt: AssembledPrompt,
        library: ChunkLibrary,
        config: SpecCacheConfig,
        started: float,
    ) -> Draft:
        """The draft in which every chunk has its state; begins to read those that are loaded."""
        policy, engine = self._policy(config.policy), self._host.engine
        if policy.reuses:
            placing = Placing(library.namespace, engine.present, config.min_reuse_tokens)
            chunks, reasons = placing.chunks(prompt)
            kind = approximate_kind(
                library.namespace.digest, policy, config.recompute_ratio, config.scoring, config.speculative_model
            )
        else:
            chunks, reasons = all_computed(prompt)
            kind = exact_kind(config.tenant)
        reuse = ReusePlan(prompt.token_ids, tuple(chunks), anchor_tokens=len(library.namespace.anchor_ids), kind=kind)
        if reuse.stored:
            engine.prefetch([ChunkKey(chunk.key) for chunk in reuse.stored])  # read while tokens are scored
        return Draft(asked, prompt, reuse, tuple(reasons), config, policy, started)
