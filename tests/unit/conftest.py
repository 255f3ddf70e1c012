"""A host whose engines are fake ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speccache_rag.config import SpecCacheConfig
from speccache_rag.hosting import engine_host as host_module
from speccache_rag.hosting.engine_host import EngineHost
from tests.unit.fake_engine import FakeEngine

THREAD = "speccache-engine"


class Maker:
    """Stands in for an engine class; `made` holds what it made."""

    def __init__(self) -> None:
        self.made: list[FakeEngine] = []
        self.constructor_fault: Exception | None = None
        self.start_faults: list[Exception] = []
        self._before = set(threading.enumerate())

    def threads(self) -> list[threading.Thread]:
        """Engine threads that this maker's engines brought."""
        return [t for t in threading.enumerate() if t.name == THREAD and t not in self._before]

    def load(self, name: str) -> Callable[..., FakeEngine]:
        assert name == "vllm"
        return self

    def __call__(self, model: Path, options: dict[str, Any], store: dict[str, Any]) -> FakeEngine:
        if self.constructor_fault is not None:
            raise self.constructor_fault
        engine = FakeEngine(model, options, store)
        engine.start_fault = self.start_faults.pop() if self.start_faults else None
        self.made.append(engine)
        return engine


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Every engine is a fake one, and no host outlives the test."""
    made = Maker()
    monkeypatch.setattr(host_module, "ENGINES", made)
    monkeypatch.setattr(EngineHost, "_hosts", {})
    yield made
    EngineHost._stop_all()
    assert all(engine.closed for engine in made.made)
    assert made.threads() == []


@pytest.fixture
def config(tiny_folder: Path) -> SpecCacheConfig:
    return SpecCacheConfig.build(model=str(tiny_folder))


def changed(config: SpecCacheConfig, **changes: Any) -> SpecCacheConfig:
    """The configuration with some options replaced."""
    return SpecCacheConfig.build(**{**config.model_dump(), **changes})
