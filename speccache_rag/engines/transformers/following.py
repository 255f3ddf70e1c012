"""A prompt's own greedy answer, and its logits along another one: what comparisons of prefills are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from speccache_rag.engines.base import EngineRequest
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.prefill import prefill
from speccache_rag.store.base import ChunkStore


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """One prefill, asked for every token of an answer that it was given."""

    followed_ids: tuple[int, ...]
    """The given answer, or its own where none was given; the token that ends an answer is part of it."""
    logits: torch.Tensor
    """float32 [A, V] on the CPU: what the model says in the place of each of `followed_ids`, after those before."""
    own_ids: tuple[int, ...]
    """The answer that this prefill gives by itself, greedily."""
    own_text: str


def follow(
    target: TargetModel,
    store: ChunkStore,
    request: EngineRequest,
    answer_ids: Sequence[int] | None,
    max_new_tokens: int,
) -> Followed:
    """Prefill a request's prompt and force an answer on it (teacher forcing).

    Args:
        target: the model.
        store: where the chunks' KV is.
        request: prompt and selection; its sampling options are not used.
        answer_ids: the answer to follow, at least one token; None follows the prompt's own.
        max_new_tokens: the most tokens of an own answer.
    """
    prefilled = prefill(target, store, request)
    n, cache = request.prompt.n_tokens, prefilled.cache
    assert isinstance(cache, DynamicCache)
    if answer_ids is None:
        answer_ids = _greedy(target, cache, n, prefilled.logits, max_new_tokens)
        _cut(cache, n)
    logits = prefilled.logits[None]
    if len(answer_ids) > 1:
        logits = torch.cat([logits, target.extend_all(answer_ids[:-1], n, cache)])
    own = tuple(answer_ids)
    different = (logits.argmax(dim=-1).cpu() != torch.tensor(own)).nonzero()
    if len(different):
        # Greedily, it gives the same tokens up to the first that differs, and goes its own way from there.
        same = int(different[0])
        _cut(cache, n + same)
        own = (*own[:same], *_greedy(target, cache, n + same, logits[same], max_new_tokens - same))
    text = target.tokenizer.decode(list(own), skip_special_tokens=True)
    return Followed(tuple(answer_ids), logits.float().cpu(), own, text)


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
