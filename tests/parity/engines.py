"""What the laws need of a running engine: written KV, logprobs, and texts to make prompts of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.scoring.questions import TargetQuestion
from speccache_rag.types import ChunkKV, Completion
from tests.hosts import host_of

# Every tolerance of the laws, in one place. float32 throughout; the engine sums in another order than its own plain
# prefill does, and nothing more may differ.
LOGPROB_ATOL = 2e-4
KV_ATOL = 2e-4
# Two implementations of the same model in float32: other kernels, other order of sums.
ENGINES_ATOL = 2e-3

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


def answer_to(sc: SpecCache, plan: ReusePlan, question: TargetQuestion) -> np.ndarray:
    """What the engine answers."""
    host = host_of(sc)
    return host.loop.run(host.engine.ask(plan, question))


def plain(plan: ReusePlan) -> ReusePlan:
    """The same prompt, of which nothing is reused."""
    return ReusePlan(plan.token_ids)


def written_kv(sc: SpecCache, plan: ReusePlan) -> ChunkKV:
    """All keys and values that a prompt's prefill leaves in the engine's own cache, [L, T, H, D]."""
    if sc.config.engine == "transformers":
        from tests.parity.transformers_kv import written_kv as written
    else:
        from tests.parity.vllm_kv import written_kv as written
    return written(sc, plan)


def store_of(sc: SpecCache) -> Any:
    """An engine's store; vLLM's front end has the disk tier only, over the same folder as its worker."""
    engine: Any = host_of(sc).engine
    return engine._store if sc.config.engine == "transformers" else engine._presence._disk


def poison_cache(sc: SpecCache, value: float) -> None:
    """Put `value` everywhere in the cache that requests share; whoever reads a row it did not write will show it.

    The Transformers engine has no such cache: each request's begins at zero.
    """
    if sc.config.engine != "transformers":
        from tests.parity.vllm_kv import poison_cache as poison

        poison(sc, value)


def first_tokens(kv: ChunkKV, n: int) -> ChunkKV:
    """The KV of the first `n` tokens."""
    return replace(kv, keys=kv.keys[:, :n], values=kv.values[:, :n], token_ids=kv.token_ids[:n])


def assert_kv_equal(found: ChunkKV, expected: ChunkKV, layers: slice = slice(None), atol: float = KV_ATOL) -> None:
    """Keys and values equal in the given layers."""
    torch.testing.assert_close(found.keys[layers], expected.keys[layers], atol=atol, rtol=0)
    torch.testing.assert_close(found.values[layers], expected.values[layers], atol=atol, rtol=0)
