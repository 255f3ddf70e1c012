"""The evaluation harness: contestants against full recompute, example by example, in the Transformers engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from speccache_rag.config import SpecCacheConfig
from speccache_rag.engines.base import Followed
from speccache_rag.engines.reuse.plan import runs
from speccache_rag.errors import ConfigurationError
from speccache_rag.evaluation.contestants import Contestant
from speccache_rag.evaluation.datasets import Example
from speccache_rag.evaluation.divergence import divergence
from speccache_rag.evaluation.records import FULL, Key, Record, pack
from speccache_rag.evaluation.scoring_cost import scoring_tokens
from speccache_rag.evaluation.tasks import chat
from speccache_rag.plan.prompt_plan import PromptPlan
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before
from speccache_rag.runtime import SpecCache

REFERENCE = Contestant(FULL, 1.0)


class Evaluation:
    """Contestants over one loaded target model.

    Args:
        config: target model, store, tenant and engine options; its policy fields give way to each contestant's.
        contestants: who takes part, beside full recompute.
        keep_texts: False leaves answers out of the records; a data set's licence may ask for that.

    Raises:
        ConfigurationError: another engine was asked for, or a contestant's policy makes no sense.
    """

    def __init__(self, config: SpecCacheConfig, contestants: Sequence[Contestant], *, keep_texts: bool = True) -> None:
        if config.engine != "transformers":
            raise ConfigurationError(
                f"engine is {config.engine!r}; the evaluation needs logits over the whole vocabulary.",
                hint="Pass engine='transformers'.",
            )
        self._everybody = [REFERENCE, *(one for one in contestants if one.policy != FULL)]
        for one in self._everybody:
            _ = one.built
        self._config = config
        self._keep_texts = keep_texts
        self._runtimes: dict[tuple[str | None, bool, str], SpecCache] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def missing(self, example: Example, done: Collection[Key]) -> list[Contestant]:
        """The contestants, full recompute among them, that have no record of an example yet."""
        return [one for one in self._everybody if self._key(example, one) not in done]

    def run(
        self, example: Example, wanted: Sequence[Contestant], advance: Callable[[], None] = lambda: None
    ) -> Iterator[Record]:
        """One record for each of `wanted`; `advance` is called after each.

        Full recompute runs once, for all of them.

        Raises:
            PromptError: the example does not fit in the model's context, or has a chunk without text.
        """
        limit = example.task.max_new_tokens
        full = self.runtime(example)
        full.warm(example.texts, show_progress=False)  # makes them known, so that they are counted as chunks
        gold = _gold_ids(full, example)
        plan = full.plan(example.messages, policy=FULL)
        reference = full.follow(plan, max_new_tokens=limit, likelihood_of=gold)
        for one in wanted:
            if one == REFERENCE:
                yield self._record(example, one, plan, reference, reference)
            else:
                runtime = self.runtime(example, one)
                runtime.warm(example.texts, show_progress=False)
                planned = runtime.plan(
                    example.messages, policy=one.policy, recompute_ratio=one.recompute_ratio, scoring=one.scoring
                )
                answer = runtime.follow(planned, reference.followed_ids, max_new_tokens=limit, likelihood_of=gold)
                yield self._record(example, one, planned, reference, answer)
            advance()

    def runtime(self, example: Example, one: Contestant = REFERENCE) -> SpecCache:
        """The runtime with a contestant's scorer, for prompts with an example's header. All share one engine."""
        built, header = one.built, example.task.instruction
        key = one.speculative_model, built.needs_speculative_kv, header
        if key not in self._runtimes:
            options: dict[str, Any] = {
                "anchor": self._config.anchor if self._config.anchor is not None else _anchor(self._config, header),
                "speculative_model": one.speculative_model,
                # What is configured tells `warm` what to prepare.
                "policy": one.policy if built.needs_speculative_model else "full_reuse",
                "policy_options": {},
            }
            config = SpecCacheConfig.build(**{**self._config.model_dump(), **options})
            self._runtimes[key] = self._stack.enter_context(SpecCache.from_config(config))
        return self._runtimes[key]

    def _key(self, example: Example, one: Contestant) -> Key:
        return example.dataset, example.id, self.target, one.name, one.recompute_ratio

    @property
    def target(self) -> str:
        """The target model's name in records."""
        return Path(self._config.model).name

    def _record(
        self, example: Example, one: Contestant, plan: PromptPlan, reference: Followed, found: Followed
    ) -> Record:
        distance = divergence(reference.logits, found.logits)
        # Where every top token agrees the answers are the same, whatever rounding makes of a tie.
        answer = reference.own_text if distance.agreement == 1 else found.own_text
        counts, reuse = plan.reuse.counts(), plan.reuse
        task = example.task.measures if example.answers else {}
        measures: dict[str, Any] = {name: measure(answer, example.answers) for name, measure in task.items()}
        chunk_positions = plan.prompt.chunk_positions()
        recomputed = np.isin(chunk_positions, np.flatnonzero(reuse.actions() == "recomputed"))
        region = reuse.region_end or plan.prompt.region_end
        n, in_chunks = plan.prompt.n_tokens, len(chunk_positions)
        return Record(
            example=example.id,
            dataset=example.dataset,
            target=self.target,
            contestant=one.name,
            policy=one.policy,
            recompute_ratio=one.recompute_ratio,
            effective_ratio=float(recomputed.mean()) if in_chunks else 0.0,
            kl=distance.kl,
            agreement=distance.agreement,
            nll=found.nll,
            prompt_tokens=n,
            chunk_tokens=in_chunks,
            chunks=len(reuse.chunks),
            exact_tokens=sum(chunk.length for chunk in reuse.chunks if chunk.exact),
            selected_tokens=counts.recomputed,
            missed_tokens=counts.missed,
            fresh_tokens=region - sum(chunk.length for chunk in reuse.chunks),
            query_tokens=n - region,
            runs=len(runs(reuse.positions(0))) if reuse.stored else 1,
            scoring_tokens=self._scoring_tokens(one, plan),
            scoring=plan.scoring,
            speculative_model=Path(one.speculative_model).name if one.speculative_model else None,
            score_s=plan.score_s,
            answer=answer if self._keep_texts else None,
            answer_sha256=hashlib.sha256(answer.encode()).hexdigest()[:16],
            selected=pack(recomputed),
            **measures,
        )

    def _scoring_tokens(self, one: Contestant, plan: PromptPlan) -> float:
        if plan.scoring is None:
            return 0.0
        counts = plan.reuse.counts()
        costs = [
            scoring_tokens(
                question,
                target=self._config.model,
                speculative=one.speculative_model,
                scoring="online" if plan.scoring == "online" else one.scoring,
                prompt_tokens=plan.prompt.n_tokens,
                region_tokens=plan.reuse.region_end,
                uncached_tokens=counts.fresh + counts.missed,
            )
            for question in one.built.questions()
        ]
        return round(sum(costs), 1)


def _gold_ids(runtime: SpecCache, example: Example) -> list[int]:
    """The first reference answer as the model would say it, its end included; nothing where there is none."""
    if not example.answers:
        return []
    tokenizer = runtime.tokenizer
    ids: list[int] = tokenizer(example.answers[0], add_special_tokens=False)["input_ids"]
    return [*ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])]


def _anchor(config: SpecCacheConfig, instruction: str) -> str:
    """What every prompt begins with, up to the first chunk: a chunk captured behind it sees what it will see."""
    with SpecCache.from_config(config.model_copy(update={"policy": FULL, "policy_options": {}})) as sc:
        rendered = ChatTemplate(sc.tokenizer).render(chat(instruction + CONTEXT_MARK))
    return text_before(rendered, CONTEXT_MARK) or ""
