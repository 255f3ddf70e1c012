"""What the laws need of a running vLLM engine: written KV, logprobs, and texts to make prompts of."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm.inputs import TokensPrompt

from speccache_rag import SpecCache
from speccache_rag.engines.vllm.engine import VllmEngine
from speccache_rag.engines.vllm.options import sampling_params
from speccache_rag.engines.vllm.plan import PARAM, CapturePlan, ReusePlan
from speccache_rag.factory import build_store
from speccache_rag.preparation import PreparedRequest
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKV, Completion, Selection

# Every tolerance of the laws, in one place. float32 throughout; the engine sums in another order than its own plain
# prefill does, and nothing more may differ.
LOGPROB_ATOL = 2e-4
KV_ATOL = 2e-4

CHUNKS = (
    "The mill of Arden was built in 1892 by masons from the north. It ground rye for forty years, and it burned down "
    "twice; each time the village rebuilt it with the stones of the old wall.",
    "A bridge in Boro carries the road over the river. Its third arch is younger than the others, because a flood took "
    "it in 1911, and the toll that paid for the work was still taken in 1950.",
    "Cale keeps the oldest clock in the valley; it has one hand only. Visitors set their watches by it and are late, "
    "which nobody in Cale has ever thought to be a fault of the clock.",
)
QUESTION = "\n\nQuestion: which of them burned down twice?\nAnswer:"


def prompt_of(texts: Sequence[str], question: str = QUESTION) -> list[dict[str, str]]:
    """A chat with the texts as its context."""
    return [{"role": "user", "content": "Context:\n" + "\n---\n".join(texts) + question}]


def ask(sc: SpecCache, prompt: Any, *, cold: bool = True, **options: Any) -> Completion:
    """Greedy answer with logprobs, from a cold prefix cache unless told otherwise."""
    if cold:
        sc.reset_prefix_cache()
    return sc.generate(prompt, **{"max_tokens": 6, "temperature": 0.0, "logprobs": 8, "ignore_eos": True, **options})


def assert_same(found: Completion, expected: Completion, atol: float = LOGPROB_ATOL) -> None:
    """Equal texts, and equal logprobs of the expected top tokens at every step."""
    assert found.text == expected.text
    assert found.logprobs is not None and expected.logprobs is not None
    assert len(found.logprobs) == len(expected.logprobs)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= len(theirs) - 1, (ours, theirs)  # the last of the top tokens may tie
        for token in shared:
            assert abs(ours[token] - theirs[token]) <= atol, (token, ours[token], theirs[token])


def difference(a: Completion, b: Completion) -> float:
    """Largest difference of logprobs that both report."""
    assert a.logprobs is not None and b.logprobs is not None
    return max(abs(x[t] - y[t]) for x, y in zip(a.logprobs, b.logprobs, strict=True) for t in x.keys() & y.keys())


def prepared(sc: SpecCache, prompt: Any, **options: Any) -> PreparedRequest:
    """The request `sc` would send."""
    names = ("policy", "recompute_ratio", "scoring")
    return sc._prepare(prompt, *(options.get(name) for name in names), {})


def written_kv(sc: SpecCache, prompt: AssembledPrompt, selection: Selection | None) -> ChunkKV:
    """All keys and values that a request's prefill wrote into vLLM's cache, [L, T, H, D]; the last write counts."""
    host = sc._open()
    engine = host.engine
    assert isinstance(engine, VllmEngine)
    whole = Chunk(_probe_key(prompt, selection), prompt.text, prompt.token_ids, prompt.offsets)
    sc.reset_prefix_cache()

    async def run() -> None:
        tag = engine._tag()
        params = CapturePlan(whole.key, 0, whole.n_tokens, tag).to_params()
        tokens = TokensPrompt(prompt_token_ids=list(prompt.token_ids))
        if selection is not None:
            plan = ReusePlan.of(prompt, selection, tag)
            params[PARAM] = {**plan.to_params()[PARAM], **params[PARAM]}
            tokens["cache_salt"] = plan.salt()
        sampling = sampling_params({"max_tokens": 1, "temperature": 0.0}, params)
        async for _ in engine._alive().generate(tokens, sampling, tag):
            pass
        stored = await engine._rpc("speccache_take_capture", tag)
        assert isinstance(stored, int), f"not every position was written: {stored}"

    host.loop.run(run())
    with build_store({"path": sc.config.store, "ram_bytes": 1}) as store:
        kv = store.get(whole.key)
        assert kv is not None
        store.delete(whole.key)
    return dataclasses.replace(kv, keys=kv.keys.clone(), values=kv.values.clone())


def _probe_key(prompt: AssembledPrompt, selection: Selection | None) -> Any:
    chosen = () if selection is None else tuple(selection.positions.tolist())
    return hashlib.sha256(repr((prompt.token_ids, selection is None, chosen)).encode()).hexdigest()


def assert_kv_equal(found: ChunkKV, expected: ChunkKV, layers: slice = slice(None), atol: float = KV_ATOL) -> None:
    """Keys and values equal in the given layers."""
    torch.testing.assert_close(found.keys[layers], expected.keys[layers], atol=atol, rtol=0)
    torch.testing.assert_close(found.values[layers], expected.values[layers], atol=atol, rtol=0)
