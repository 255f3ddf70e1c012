"""What a policy may ask of an engine: right by definition on one engine, and the same on both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speccache_rag import SpecCache
from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.questions import KVDeviation, QueryAttention
from speccache_rag.types import Selection
from tests.parity.engines import CHUNKS, ask, assert_same, prepared, written_kv
from tests.parity.laws import THREE
from tests.tiny import tiny_model


@pytest.mark.parametrize("of", ["value", "key"])
@pytest.mark.parametrize("layer", [1, 3])
def test_kv_deviation_is_the_distance_of_reused_from_plain_kv(engine_sc: SpecCache, of: str, layer: int) -> None:
    prompt = prepared(engine_sc, THREE, policy="full_reuse").request.prompt
    nothing = Selection(np.empty(0, dtype=np.int64), 0.0, prompt.n_chunk_tokens)
    found = engine_sc._models.kv_deviation(prompt, KVDeviation(of, layer))
    reused, plain = written_kv(engine_sc, prompt, nothing), written_kv(engine_sc, prompt, None)
    kind = "values" if of == "value" else "keys"
    distance = (getattr(reused, kind)[layer] - getattr(plain, kind)[layer]).square().sum(dim=(1, 2)).numpy()
    positions = prompt.chunk_positions()
    np.testing.assert_allclose(found[positions], distance[positions], atol=1e-3, rtol=1e-3)
    assert distance[positions].max() > 0.1
    assert np.isnan(np.delete(found, positions)).all()


def test_kv_deviation_is_zero_in_layer_0(engine_sc: SpecCache) -> None:
    prompt = prepared(engine_sc, THREE, policy="full_reuse").request.prompt
    for of in ("value", "key"):
        found = engine_sc._models.kv_deviation(prompt, KVDeviation(of, 0))
        assert np.nanmax(found) < 1e-6


def test_an_unknown_layer_is_refused_and_the_engine_goes_on(engine_sc: SpecCache) -> None:
    options = {"policy": "cacheblend", "recompute_ratio": 0.2}
    with pytest.raises(ConfigurationError, match="Layer index 4"):
        engine_sc._models.kv_deviation(prepared(engine_sc, THREE).request.prompt, KVDeviation(layer=4))
    assert ask(engine_sc, THREE, **options).text


@pytest.mark.parametrize("layers", ["all", "last_third", "last"])
def test_query_attention_is_a_share_of_one_and_looks_back_only(engine_sc: SpecCache, layers: str) -> None:
    prompt = prepared(engine_sc, THREE, policy="full_reuse").request.prompt
    found = engine_sc._models.query_attention(prompt, QueryAttention("target", layers))
    assert found.shape == (prompt.n_tokens,)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert found[: prompt.region_end].max() > 0.01
    # The last token is seen by itself alone; its share of the mean cannot pass 1 / Q.
    assert found[-1] <= 1 / (prompt.n_tokens - prompt.region_end) + 1e-6


def test_what_was_kept_of_another_header_changes_nothing(engine_sc: SpecCache) -> None:
    def attention(header: str) -> np.ndarray:
        messages = [{"role": "system", "content": header}, *THREE]
        prompt = prepared(engine_sc, messages, policy="full_reuse").request.prompt
        return engine_sc._models.query_attention(prompt, QueryAttention("target", "all"))

    first, other, again, twice = (attention(header) for header in ("One. ", "Quite another one. ", "One. ", "One. "))
    assert len(other) > len(first)
    for same in (again, twice):
        np.testing.assert_allclose(same, first, atol=1e-5)


@pytest.mark.vllm
def test_both_engines_answer_the_same(sc: SpecCache, tsc: SpecCache) -> None:
    for running in (sc, tsc):
        running.warm(CHUNKS, show_progress=False)
    prompts = [prepared(running, THREE, policy="full_reuse").request.prompt for running in (sc, tsc)]
    assert prompts[0].token_ids == prompts[1].token_ids
    for layers in ("all", "last_third", "last"):
        ours, theirs = (
            running._models.query_attention(prompt, QueryAttention("target", layers))
            for running, prompt in zip((sc, tsc), prompts, strict=True)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for of in ("value", "key"):
        ours, theirs = (
            running._models.kv_deviation(prompt, KVDeviation(of))
            for running, prompt in zip((sc, tsc), prompts, strict=True)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("policy", ["cacheblend", "epic", "attended"])
def test_every_policy_at_ratio_one_equals_plain_prefill_and_below_spends_its_budget(
    engine_sc: SpecCache, policy: str
) -> None:
    assert_same(
        ask(engine_sc, THREE, policy=policy, recompute_ratio=1.0), ask(engine_sc, THREE, policy="full_recompute")
    )
    report = ask(engine_sc, THREE, policy=policy, recompute_ratio=0.15).report
    assert report.recomputed_tokens == int(np.ceil(0.15 * report.matched_tokens))


def test_an_inquiry_leaves_nothing_behind(engine_sc: SpecCache) -> None:
    """Its scratch KV must not be found by the request that follows with the same tokens."""
    cold = ask(engine_sc, THREE, policy="full_recompute")
    prompt = prepared(engine_sc, THREE, policy="full_reuse").request.prompt
    engine_sc.reset_prefix_cache()
    engine_sc._models.kv_deviation(prompt, KVDeviation())
    engine_sc._models.query_attention(prompt, QueryAttention("target", "all"))
    assert_same(ask(engine_sc, THREE, policy="full_recompute", cold=False), cold)


def test_attended_uses_the_speculative_models_own_kv_and_falls_back_without(tiny_folder: Path, tmp_path: Path) -> None:
    options = {
        "model": str(tiny_folder),
        "speculative_model": str(tiny_model(tmp_path / "other", seed=1)),
        "engine": "transformers",
        "store": str(tmp_path / "store"),
        "engine_options": {"dtype": "float32", "max_model_len": 1024},
    }
    with SpecCache(**options) as unwarmed:
        assert unwarmed.warm(CHUNKS, show_progress=False).speculative_bytes == 0
        report = ask(unwarmed, THREE, policy="attended").report
        assert (report.scoring, report.chunks_reused) == ("online", 3)
    with SpecCache(**options, policy="attended") as attended:
        warmed = attended.warm(CHUNKS, show_progress=False)
        assert (warmed.captured_bytes, warmed.n_captured) == (0, 0), "the target's KV was in the store"
        assert warmed.speculative_bytes > 0
        report = ask(attended, THREE).report
        assert (report.scoring, report.chunks_reused) == ("attended", 3)


def test_attended_by_a_speculative_model_that_is_the_target_chooses_as_the_target(tsc: SpecCache) -> None:
    prompt = prepared(tsc, THREE, policy="full_reuse").request.prompt
    own = tsc._models.query_attention(prompt, QueryAttention("speculative"))
    target = tsc._models.query_attention(prompt, QueryAttention("target"))
    np.testing.assert_allclose(own, target, atol=1e-5)
