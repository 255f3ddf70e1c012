"""The three laws that hold on every model and in every engine; test files say on which."""

from __future__ import annotations

from typing import Any

from speccache_rag import SpecCache
from tests.parity.engines import CHUNKS, ask, assert_kv_equal, assert_same, difference, prepared, prompt_of, written_kv

THREE = prompt_of(CHUNKS)


def assert_ratio_one_is_plain_prefill(sc: SpecCache, prompt: Any = THREE, **options: Any) -> None:
    """The whole machinery vanishes at rho = 1: same logprobs, same KV in every layer."""
    plain = ask(sc, prompt, policy="full_recompute")
    ours = ask(sc, prompt, recompute_ratio=1.0, **options)
    assert_same(ours, plain)
    assert ours.report.recomputed_tokens == ours.report.matched_tokens > 0
    assert plain.report.loaded_tokens == 0
    assert difference(ask(sc, prompt, policy="full_reuse"), plain) > 1e-2, "reuse is exact here; this shows nothing"
    request = prepared(sc, prompt, recompute_ratio=1.0, **options).request
    assert_kv_equal(written_kv(sc, request.prompt, request.selection), written_kv(sc, request.prompt, None))


def assert_layer_0_is_plain_prefill(sc: SpecCache, policy: str, prompt: Any = THREE) -> None:
    """Its KV depends on token and position only, so it proves assembly, positions, store and recovery at once."""
    request = prepared(sc, prompt, policy=policy, recompute_ratio=0.15).request
    assert request.selection is not None
    assert len(request.selection.positions) < request.prompt.n_chunk_tokens
    moved = [abs(p.start - len(sc._library.namespace.anchor_ids)) for p in request.prompt.placements]
    assert max(moved) > 50, "no chunk was moved far, so recovery is hardly tested"
    reused, plain = (written_kv(sc, request.prompt, selection) for selection in (request.selection, None))
    assert_kv_equal(reused, plain, layers=slice(0, 1))
    # The deeper layers are approximate, or the test would show nothing.
    assert (reused.values[1:] - plain.values[1:]).abs().max() > 1e-2


def assert_a_chunk_at_its_place_is_plain_prefill(sc: SpecCache) -> None:
    """The cache path adds no error: full reuse of one chunk where it was captured."""
    prompt = sc._open().tokenizer.header() + CHUNKS[0] + "\n\nQuestion: when was the mill built?"
    ours = ask(sc, prompt, policy="full_reuse")
    assert_same(ours, ask(sc, prompt, policy="full_recompute"))
    assert ours.report.loaded_tokens == ours.report.matched_tokens > 0
    request = prepared(sc, prompt, policy="full_reuse").request
    assert_kv_equal(written_kv(sc, request.prompt, request.selection), written_kv(sc, request.prompt, None))
