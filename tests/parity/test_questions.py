"""What a policy may ask of an engine: right by definition on one engine, and the same on both."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from speccache_rag import SpecCache
from speccache_rag.engines.reuse.rope import RopeTable
from speccache_rag.engines.transformers.cache import ReuseCache
from speccache_rag.engines.transformers.kv_deviation import StoppingCache
from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.layers import LayerRange
from speccache_rag.scoring.questions import KVDeviation, QueryAttention, TargetQuestion
from tests.parity.engines import CHUNKS, answer_to, ask, assert_same, plain, written_kv
from tests.parity.laws import THREE
from tests.tiny import tiny_model


@pytest.mark.parametrize("of", ["value", "key"])
@pytest.mark.parametrize("layer", [1, 3])
def test_kv_deviation_is_the_distance_of_reused_from_plain_kv(
    engine_sc: SpecCache, of: Literal["value", "key"], layer: int
) -> None:
    planned = engine_sc.plan(THREE, policy="full_reuse")
    found = answer_to(engine_sc, planned.reuse, KVDeviation(of, layer))
    reused, exact = written_kv(engine_sc, planned.reuse), written_kv(engine_sc, plain(planned.reuse))
    kind = "values" if of == "value" else "keys"
    distance = (getattr(reused, kind)[layer] - getattr(exact, kind)[layer]).square().sum(dim=(1, 2)).numpy()
    positions = planned.prompt.chunk_positions()
    np.testing.assert_allclose(found[positions], distance[positions], atol=1e-3, rtol=1e-3)
    assert distance[positions].max() > 0.1
    assert np.isnan(np.delete(found, positions)).all()


def test_kv_deviation_is_zero_in_layer_0(engine_sc: SpecCache) -> None:
    plan = engine_sc.plan(THREE, policy="full_reuse").reuse
    for question in (KVDeviation("value", 0), KVDeviation("key", 0)):
        assert np.nanmax(answer_to(engine_sc, plan, question)) < 1e-6


def test_what_is_recomputed_does_not_change_an_answer(engine_sc: SpecCache) -> None:
    """A question is about stored KV, whatever was chosen before."""
    reuse = engine_sc.plan(THREE, policy="full_reuse").reuse
    chosen = engine_sc.plan(THREE, policy="random", recompute_ratio=0.5).reuse
    assert chosen.recompute
    for question in (KVDeviation(), QueryAttention("target")):
        np.testing.assert_allclose(
            answer_to(engine_sc, chosen, question), answer_to(engine_sc, reuse, question), atol=1e-5
        )


def test_an_unknown_layer_is_refused_and_the_engine_goes_on(engine_sc: SpecCache) -> None:
    with pytest.raises(ConfigurationError, match="Layer index 4"):
        answer_to(engine_sc, engine_sc.plan(THREE, policy="full_reuse").reuse, KVDeviation(layer=4))
    assert ask(engine_sc, THREE, policy="cacheblend", recompute_ratio=0.2).text


@pytest.mark.parametrize("layers", ["all", "last_third", "last"])
def test_query_attention_is_a_share_of_one_and_looks_back_only(engine_sc: SpecCache, layers: LayerRange) -> None:
    plan = engine_sc.plan(THREE, policy="full_reuse").reuse
    found = answer_to(engine_sc, plan, QueryAttention("target", layers))
    assert found.shape == (len(plan.token_ids),)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert found[: plan.region_end].max() > 0.01
    # The last token is seen by itself alone; its share of the mean cannot pass 1 / Q.
    assert found[-1] <= 1 / (len(plan.token_ids) - plan.region_end) + 1e-6


def test_what_was_kept_of_another_header_changes_nothing(engine_sc: SpecCache) -> None:
    def attention(header: str) -> np.ndarray:
        messages = [{"role": "system", "content": header}, *THREE]
        plan = engine_sc.plan(messages, policy="full_reuse").reuse
        return answer_to(engine_sc, plan, QueryAttention("target", "all"))

    first, other, again, twice = (attention(header) for header in ("One. ", "Quite another one. ", "One. ", "One. "))
    assert len(other) > len(first)
    for same in (again, twice):
        np.testing.assert_allclose(same, first, atol=1e-5)


@pytest.mark.vllm
def test_both_engines_answer_the_same(sc: SpecCache, tsc: SpecCache) -> None:
    for running in (sc, tsc):
        running.warm(CHUNKS, show_progress=False)
    ours, theirs = (running.plan(THREE, policy="full_reuse").reuse for running in (sc, tsc))
    assert ours.token_ids == theirs.token_ids
    attentions = (QueryAttention("target", "all"), QueryAttention("target"), QueryAttention("target", "last"))
    for question in (*attentions, KVDeviation("value"), KVDeviation("key")):
        np.testing.assert_allclose(
            answer_to(sc, ours, question), answer_to(tsc, theirs, question), atol=1e-4, rtol=1e-3, err_msg=str(question)
        )


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
    plan = engine_sc.plan(THREE, policy="full_reuse").reuse
    engine_sc.reset_prefix_cache()
    answer_to(engine_sc, plan, KVDeviation())
    answer_to(engine_sc, plan, QueryAttention("target", "all"))
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
    with SpecCache.from_config(tsc.config.model_copy(update={"policy": "attended"})) as attended:
        attended.warm(CHUNKS, show_progress=False)
        own = attended.plan(THREE)
    assert (own.scoring, own.scores is None) == ("attended", False)
    target = answer_to(tsc, tsc.plan(THREE, policy="full_reuse").reuse, QueryAttention("target"))
    np.testing.assert_allclose(own.scores, target, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("question", [KVDeviation(), QueryAttention("target")], ids=repr)
def test_an_error_in_a_question_fails_that_question_only(
    tsc: SpecCache, question: TargetQuestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tsc.plan(THREE, policy="full_reuse").reuse
    before = answer_to(tsc, plan, question)
    with monkeypatch.context() as broken:
        broken.setattr(ReuseCache, "write", _fail)
        broken.setattr(RopeTable, "move", _fail)
        broken.setattr(StoppingCache, "update", _fail)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            answer_to(tsc, plan, question)
    np.testing.assert_array_equal(answer_to(tsc, plan, question), before)
    assert ask(tsc, THREE, policy="full_reuse").report.chunks_reused == 3


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("broken on purpose")
