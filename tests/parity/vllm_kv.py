"""The KV a request writes into a running vLLM's paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.vllm.frontend.engine import VllmEngine
from speccache_rag.types import ChunkKV
from tests.hosts import host_of


def engine_of(sc: SpecCache) -> VllmEngine:
    """The running vLLM engine."""
    engine = host_of(sc).engine
    assert isinstance(engine, VllmEngine)
    return engine


def in_worker(sc: SpecCache, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of the tests in vLLM's worker, which is its first argument."""
    engine = engine_of(sc)
    return host_of(sc).loop.run(engine._alive().collective_rpc(function, args=args))[0]


def written_kv(sc: SpecCache, plan: ReusePlan) -> ChunkKV:
    """All keys and values that a prompt's prefill wrote into vLLM's cache, [L, T, H, D]; the last write counts."""
    engine, n = engine_of(sc), len(plan.token_ids)
    sc.reset_prefix_cache()

    async def run() -> None:
        async for _ in engine.generate(plan, {"max_tokens": 1, "temperature": 0.0}):
            pass

    in_worker(sc, _watch)
    try:
        host_of(sc).loop.run(run())
    finally:
        keys, values, shape = in_worker(sc, _unwatch, n)
    found = [torch.from_numpy(np.frombuffer(part, dtype=np.float32).reshape(shape).copy()) for part in (keys, values)]
    assert not found[0].isnan().any(), "not every position was written"
    return ChunkKV(*found, plan.token_ids, 0)


def poison_cache(sc: SpecCache, value: float) -> None:
    """Fill the whole paged cache; nothing that vLLM's prefix cache knew of it is left."""
    in_worker(sc, _fill_cache, value)
    sc.reset_prefix_cache()


def _attention_layers(worker: Any) -> list[Any]:
    return list(worker.model_runner.compilation_config.static_forward_context.values())


def _fill_cache(worker: Any, value: float) -> None:
    """Runs in vLLM's worker."""
    for layer in _attention_layers(worker):
        layer.kv_cache.fill_(value)


def _watch(worker: Any) -> None:
    """Runs in vLLM's worker: note every KV cache update, and the blocks of the one request that runs.

    Slots alone would not do: a fill writes in steps that do not schedule its request.
    """
    runner = worker.model_runner
    worker.seen = [[] for _ in _attention_layers(worker)]
    worker.blocks = []

    def tap(index: int, update: Any) -> Any:
        def tapped(layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
            n = key.shape[0]
            worker.seen[index].append((slots[:n].clone(), key.clone(), value.clone()))
            if runner.input_batch.num_reqs:
                worker.blocks = runner.input_batch.block_table[0].get_numpy_array()[0].tolist()
            update(layer, key, value, kv_cache, slots)

        return tapped

    for index, layer in enumerate(_attention_layers(worker)):
        layer.impl.do_kv_cache_update = tap(index, layer.impl.do_kv_cache_update)


def _unwatch(worker: Any, n: int) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Runs in vLLM's worker: the last keys and values of positions 0 .. n - 1 in every layer, NaN where none were."""
    block_size = worker.model_runner.cache_config.block_size
    wanted = [worker.blocks[p // block_size] * block_size + p % block_size for p in range(n)]
    found: tuple[list[Any], list[Any]] = ([], [])
    for layer, writes in zip(_attention_layers(worker), worker.seen, strict=True):
        del layer.impl.do_kv_cache_update
        slots = torch.cat([slots for slots, _, _ in writes]).tolist()
        last = {slot: row for row, slot in enumerate(slots)}
        rows = torch.tensor([last.get(slot, -1) for slot in wanted])
        for kind, part in enumerate(found):
            values = torch.cat([write[1 + kind] for write in writes])[rows].float()
            values[rows < 0] = float("nan")
            part.append(values)
    keys, values = (torch.stack(part).cpu().numpy() for part in found)
    return keys.tobytes(), values.tobytes(), keys.shape
