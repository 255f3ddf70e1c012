"""The KV a request writes into a running vLLM's paged cache."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from vllm.inputs import TokensPrompt

from speccache_rag import SpecCache
from speccache_rag.engines.reuse import plan as neutral
from speccache_rag.engines.vllm.frontend.engine import VllmEngine
from speccache_rag.engines.vllm.frontend.options import sampling_params
from speccache_rag.engines.vllm.plan import PARAM, CapturePlan, ReusePlan
from speccache_rag.store.factory import build_store
from speccache_rag.types import ChunkKV
from tests.hosts import host_of


def written_kv(sc: SpecCache, planned: neutral.ReusePlan) -> ChunkKV:
    """All keys and values that a prompt's prefill wrote into vLLM's cache, [L, T, H, D]; the last write counts."""
    host = host_of(sc)
    engine = host.engine
    assert isinstance(engine, VllmEngine)
    key, n = _probe_key(planned), len(planned.token_ids)
    sc.reset_prefix_cache()

    async def run() -> None:
        tag = engine._tag()
        params = CapturePlan(key, 0, n, tag).to_params()
        tokens = TokensPrompt(prompt_token_ids=list(planned.token_ids))
        if planned.stored:
            plan = ReusePlan.of(planned, tag)
            params[PARAM] = {**plan.to_params()[PARAM], **params[PARAM]}
            tokens["cache_salt"] = plan.salt()
        sampling = sampling_params({"max_tokens": 1, "temperature": 0.0}, params)
        async for _ in engine._alive().generate(tokens, sampling, tag):
            pass
        stored = await engine._rpc("speccache_take_capture", tag)
        assert isinstance(stored, int), f"not every position was written: {stored}"

    host.loop.run(run())
    with build_store({"path": sc.config.store, "ram_bytes": 1}) as store:
        kv = store.get(key)
        assert kv is not None
        store.delete(key)
    return dataclasses.replace(kv, keys=kv.keys.clone(), values=kv.values.clone())


def poison_cache(sc: SpecCache, value: float) -> None:
    """Fill the whole paged cache; nothing that vLLM's prefix cache knew of it is left."""
    host = host_of(sc)
    engine = host.engine
    assert isinstance(engine, VllmEngine)

    async def run() -> None:
        await engine._alive().collective_rpc(_fill_cache, args=(value,))
        await engine.reset_prefix_cache()

    host.loop.run(run())


def _fill_cache(worker: Any, value: float) -> None:
    """Runs in vLLM's worker."""
    for layer in worker.model_runner.compilation_config.static_forward_context.values():
        layer.kv_cache.fill_(value)


def _probe_key(plan: neutral.ReusePlan) -> Any:
    return hashlib.sha256(repr(plan).encode()).hexdigest()
