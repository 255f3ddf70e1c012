"""The three laws that hold on every model and in every engine; test files say on which."""

from __future__ import annotations

from typing import Any

from speccache_rag import SpecCache
from tests.hosts import host_of
from tests.parity.engines import (
    CHUNKS,
    ask,
    assert_kv_equal,
    assert_same,
    difference,
    plain,
    prompt_of,
    written_kv,
)

THREE = prompt_of(CHUNKS)


def assert_ratio_one_is_plain_prefill(sc: SpecCache, prompt: Any = THREE, **options: Any) -> None:
    """The whole machinery vanishes at rho = 1: same logprobs, same KV in every layer."""
    exact = ask(sc, prompt, policy="full_recompute")
    ours = ask(sc, prompt, recompute_ratio=1.0, **options)
    assert_same(ours, exact)
    assert ours.report.recomputed_tokens == ours.report.matched_tokens > 0
    assert exact.report.loaded_tokens == 0
    assert difference(ask(sc, prompt, policy="full_reuse"), exact) > 1e-2, "reuse is exact here; this shows nothing"
    plan = sc.plan(prompt, recompute_ratio=1.0, **options).reuse
    assert_kv_equal(written_kv(sc, plan), written_kv(sc, plain(plan)))


def assert_layer_0_is_plain_prefill(sc: SpecCache, policy: str, prompt: Any = THREE) -> None:
    """Its KV depends on token and position only, so it proves assembly, positions, store and recovery at once."""
    plan = sc.plan(prompt, policy=policy, recompute_ratio=0.15).reuse
    assert plan.counts().loaded > 0
    anchor_tokens = len(host_of(sc).library(sc.config).namespace.anchor_ids)
    assert max(abs(chunk.start - anchor_tokens) for chunk in plan.stored) > 50, "no chunk was moved far"
    reused, exact = written_kv(sc, plan), written_kv(sc, plain(plan))
    assert_kv_equal(reused, exact, layers=slice(0, 1))
    # The deeper layers are approximate, or the test would show nothing.
    assert (reused.values[1:] - exact.values[1:]).abs().max() > 1e-2


def assert_a_chunk_at_its_place_is_plain_prefill(sc: SpecCache) -> None:
    """The cache path adds no error: a chunk where it was captured is planned as exact, and is."""
    prompt = host_of(sc).tokenizer.header() + CHUNKS[0] + "\n\nQuestion: when was the mill built?"
    planned = sc.plan(prompt, policy="random", recompute_ratio=0.5)
    assert [chunk.exact for chunk in planned.reuse.chunks] == [True]
    assert planned.reuse.recompute == (), "what is exact needs no recompute"
    ours = ask(sc, prompt, policy="random", recompute_ratio=0.5)
    assert_same(ours, ask(sc, prompt, policy="full_recompute"))
    assert ours.report.loaded_tokens == ours.report.matched_tokens > 0
    assert_kv_equal(written_kv(sc, planned.reuse), written_kv(sc, plain(planned.reuse)))
