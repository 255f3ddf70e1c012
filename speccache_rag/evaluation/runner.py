"""Run policies against full recompute, example by example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from speccache_rag.config import Scoring, SpecCacheConfig
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.following import Followed
from speccache_rag.errors import ConfigurationError
from speccache_rag.evaluation.datasets import INSTRUCTION, Example, chat
from speccache_rag.evaluation.divergence import divergence
from speccache_rag.evaluation.metrics import best_f1
from speccache_rag.plan.planner import PreparedRequest
from speccache_rag.prompt.templates import CONTEXT_MARK, ChatTemplate, text_before
from speccache_rag.runtime import SpecCache

FULL = "full_recompute"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy with its options, under the name that tables give it."""

    name: str
    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    scoring: Scoring = "cached"
    speculative_model: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What one contestant made of one example."""

    example: str
    contestant: str
    f1: float
    kl: float
    """Mean over the tokens of full recompute's answer, in nats."""
    agreement: float
    effective_ratio: float
    answer: str
    prompt_tokens: int
    chunk_tokens: int
    scoring: str | None
    """How the policy got its scores, where it asked for any."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def all_contestants(speculative_models: Sequence[str]) -> list[Contestant]:
    """Every policy of this package.

    `speccache` scores with the first model, and stands there also without the slack of span completion, so that it can
    be compared at equal tokens; `attended` stands there once for each model, and once with the target.
    """
    return [
        Contestant("full_reuse", "full_reuse"),
        Contestant("random", "random"),
        Contestant("epic", "epic"),
        Contestant("cacheblend, value", "cacheblend", {"of": "value"}),
        Contestant("cacheblend, key", "cacheblend", {"of": "key"}),
        *(one for model in speculative_models[:1] for one in _speccache(model)),
        *(Contestant(f"attended, {Path(m).name}", "attended", speculative_model=m) for m in speculative_models),
        Contestant("attended, target", "attended", {"scorer": "target"}),
    ]


def one_policy(config: SpecCacheConfig, speculative_models: Sequence[str]) -> list[Contestant]:
    """The configured policy, once for each speculative model."""

    def named(model: str | None) -> str:
        return f"{config.policy}, {Path(model).name}" if model and len(speculative_models) > 1 else config.policy

    models: Sequence[str | None] = speculative_models or [None]
    options = (config.policy, config.policy_options, config.scoring)
    return [Contestant(named(model), *options, model) for model in models]


def _speccache(model: str) -> Iterator[Contestant]:
    yield Contestant("speccache, cached", "speccache", speculative_model=model)
    yield Contestant("speccache, cached, no slack", "speccache", {"completion_slack": 0.0}, speculative_model=model)
    yield Contestant("speccache, online", "speccache", scoring="online", speculative_model=model)


class Evaluation:
    """Contestants over one loaded target model, in the Transformers engine.

    Args:
        config: target model, ratio, store and engine options; its policy fields give way to each contestant's.
        contestants: who takes part.

    Raises:
        ConfigurationError: another engine was asked for, or a contestant's options are wrong.
    """

    def __init__(self, config: SpecCacheConfig, contestants: Sequence[Contestant]) -> None:
        if config.engine != "transformers":
            raise ConfigurationError(
                f"engine is {config.engine!r}; the evaluation needs logits over the whole vocabulary.",
                hint="Pass engine='transformers'.",
            )
        plain: dict[str, Any] = {"policy": FULL, "policy_options": {}, "speculative_model": None}
        config = config.model_copy(update=plain)
        if config.anchor is None:
            config = config.model_copy(update={"anchor": _anchor(config)})
        with ExitStack() as stack:
            # One engine: its host is shared by every SpecCache with the same model, engine options and store.
            self._full = stack.enter_context(SpecCache.from_config(config))
            self._runs = [(one, stack.enter_context(SpecCache(**_options(config, one)))) for one in contestants]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, example: Example, advance: Callable[[], None] = lambda: None) -> list[Record]:
        """One record for full recompute and for each contestant; `advance` is called after each.

        Raises:
            PromptError: the example does not fit in the model's context, or has a chunk without text.
        """
        self._full.warm(example.texts, show_progress=False)
        prepared = self._full._prepare(example.messages, None, None, None, {})
        full = _follow(self._full, prepared, None)
        records = [_record(example, FULL, prepared, full, full)]
        advance()
        for one, sc in self._runs:
            sc.warm(example.texts, show_progress=False)
            prepared = sc._prepare(example.messages, None, None, None, {})
            records.append(_record(example, one.name, prepared, full, _follow(sc, prepared, full)))
            advance()
        return records


def _options(config: SpecCacheConfig, one: Contestant) -> dict[str, Any]:
    chosen = asdict(one)
    del chosen["name"]
    return {**config.model_dump(), **chosen}


def _anchor(config: SpecCacheConfig) -> str:
    """What every prompt begins with, up to the first chunk: a chunk captured behind it sees what it will see."""
    with SpecCache.from_config(config) as sc:
        rendered = ChatTemplate(sc.tokenizer).render(chat(INSTRUCTION + CONTEXT_MARK))
    return text_before(rendered, CONTEXT_MARK) or ""


def _follow(sc: SpecCache, prepared: PreparedRequest, full: Followed | None) -> Followed:
    """A prepared request's logits along full recompute's answer; `full` None is full recompute itself."""
    host = sc._open()
    engine = host.engine
    assert isinstance(engine, TransformersEngine)
    return host.loop.run(engine.follow(prepared.request, full.followed_ids if full is not None else None))


def _record(example: Example, name: str, prepared: PreparedRequest, full: Followed, found: Followed) -> Record:
    distance = divergence(full.logits, found.logits)
    # Where every top token agrees the answers are the same, whatever rounding makes of a tie.
    answer = full.own_text if distance.agreement == 1 else found.own_text
    return Record(
        example=example.id,
        contestant=name,
        f1=best_f1(answer, example.answers),
        kl=distance.kl,
        agreement=distance.agreement,
        effective_ratio=prepared.report.effective_ratio,
        answer=answer,
        prompt_tokens=prepared.report.prompt_tokens,
        chunk_tokens=prepared.prompt.n_chunk_tokens,
        scoring=prepared.report.scoring,
    )
