"""Teacher forcing: a prompt's own greedy answer, and its logits along another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from speccache_rag.engines.base import Followed
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.prefill import prefill
from speccache_rag.store.base import ChunkStore


def follow(
    target: TargetModel,
    store: ChunkStore,
    plan: ReusePlan,
    answer_ids: Sequence[int] | None,
    max_new_tokens: int,
    likelihood_of: Sequence[int] = (),
) -> Followed:
    """Prefill a prompt as planned and force an answer on it (see `FollowingEngine`)."""
    prefilled = prefill(target, store, plan)
    n, cache = len(plan.token_ids), prefilled.cache
    assert isinstance(cache, DynamicCache)
    nll = None
    if likelihood_of:
        nll = _nll(_along(target, cache, n, prefilled.logits, likelihood_of), likelihood_of)
        _cut(cache, n)
    if answer_ids is None:
        answer_ids = _greedy(target, cache, n, prefilled.logits, max_new_tokens)
        _cut(cache, n)
    logits = _along(target, cache, n, prefilled.logits, answer_ids)
    own = tuple(answer_ids)
    different = (logits.argmax(dim=-1).cpu() != torch.tensor(own)).nonzero()
    if len(different):
        # Greedily, it gives the same tokens up to the first that differs, and goes its own way from there.
        same = int(different[0])
        _cut(cache, n + same)
        own = (*own[:same], *_greedy(target, cache, n + same, logits[same], max_new_tokens - same))
    text = target.tokenizer.decode(list(own), skip_special_tokens=True)
    return Followed(tuple(answer_ids), logits.float().cpu(), own, text, nll)


def _along(
    target: TargetModel, cache: DynamicCache, n: int, logits: torch.Tensor, answer_ids: Sequence[int]
) -> torch.Tensor:
    """[A, V]: what the model says in the place of each token of an answer; `logits` [V] are those before the first."""
    if len(answer_ids) == 1:
        return logits[None]
    return torch.cat([logits[None], target.extend_all(answer_ids[:-1], n, cache)])


def _nll(logits: torch.Tensor, answer_ids: Sequence[int]) -> float:
    """Mean negative log likelihood of an answer, in nats, by the logits [A, V] along it."""
    chosen = logits.double().log_softmax(dim=-1).cpu()[torch.arange(len(answer_ids)), torch.tensor(answer_ids)]
    return -float(chosen.mean())


def _greedy(target: TargetModel, cache: DynamicCache, n: int, logits: torch.Tensor, limit: int) -> list[int]:
    """At most `limit` tokens after the `n` ones in `cache`; `logits` [V] are those of the last of them."""
    new = [int(logits.argmax())]
    while len(new) < limit and new[-1] not in target.eos_ids:
        new.append(int(target.extend(new[-1:], n + len(new) - 1, cache).argmax()))
    return new


def _cut(cache: DynamicCache, n_tokens: int) -> None:
    """Forget everything after the first `n_tokens` tokens."""
    surplus = cache.get_seq_length() - n_tokens
    if surplus > 0:
        cache.crop(-surplus)
