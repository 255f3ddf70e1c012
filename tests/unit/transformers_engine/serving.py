"""A Transformers engine over the tiny model, and prompts for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from speccache_rag.engines.base import EngineDelta
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.engine import TransformersEngine

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256}


RAM = {"path": None, "ram_bytes": 1 << 24}


Request = tuple[ReusePlan, dict[str, Any]]


def request(n: int = 20, **sampling: Any) -> Request:
    ids = tuple(np.random.default_rng(0).integers(3, 600, n).tolist())
    return ReusePlan(ids), {"temperature": 0.0, "ignore_eos": True, **sampling}


def started(folder: Path, use: Callable[[TransformersEngine], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        engine = TransformersEngine(folder, {**OPTIONS, **options}, RAM)
        await engine.start()
        try:
            return await use(engine)
        finally:
            engine.close()

    return asyncio.run(run())


async def answer(engine: TransformersEngine, wanted: Request) -> list[EngineDelta]:
    return [delta async for delta in engine.generate(*wanted)]


def text_of(deltas: list[EngineDelta]) -> str:
    return "".join(d.text for d in deltas)
