from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speccache_rag import SpecCache
from speccache_rag.engines.base import Engine
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.hosting.loop_thread import LoopThread
from tests.contract.engine_contract import ClosingContract, EngineContract, Running
from tests.hosts import host_of
from tests.unit.fake_engine import FakeEngine

RAM = {"path": None, "ram_bytes": 1 << 26}


@contextmanager
def started(engine: Engine) -> Iterator[Running]:
    async def close() -> None:
        engine.close()

    loop = LoopThread("contract")
    try:
        loop.run(engine.start())
        yield Running(engine, loop)
    finally:
        loop.run(close())
        loop.stop()


class TestFakeEngine(EngineContract, ClosingContract):
    """The fake of the unit tests behaves as the engines it stands for."""

    @pytest.fixture
    def running(self) -> Iterator[Running]:
        with started(FakeEngine()) as found:
            yield found

    @pytest.fixture
    def ending(self, running: Running) -> Running:
        return running


class TestTransformersEngine(EngineContract, ClosingContract):
    @pytest.fixture
    def running(self, tiny_folder: Path) -> Iterator[Running]:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
        with started(TransformersEngine(tiny_folder, options, dict(RAM))) as found:
            yield found

    @pytest.fixture
    def ending(self, running: Running) -> Running:
        return running


@pytest.mark.vllm
class TestVllmEngine(EngineContract):
    """Its end is tested where it has processes to end (tests/integration/test_shutdown.py)."""

    @pytest.fixture
    def running(self, sc: SpecCache) -> Running:
        host = host_of(sc.start())
        return Running(host.engine, host.loop)
