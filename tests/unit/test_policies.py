from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from speccache_rag.errors import ConfigurationError
from speccache_rag.selection.attended import Attended
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.selection.baselines import FullRecompute, FullReuse, RandomSelection
from speccache_rag.selection.cacheblend import CacheBlend
from speccache_rag.selection.factory import build_policy
from speccache_rag.selection.speccache import SpecCachePolicy
from speccache_rag.types import AssembledPrompt
from tests.contract.policy_contract import answers_of, make_chunk, make_prompt


def scored(lengths: list[int], scores: list[float]) -> tuple[AssembledPrompt, np.ndarray]:
    """Chunks of `lengths` behind one fresh token each, with one score per chunk token."""
    prompt = make_prompt([make_chunk(str(i), n) for i, n in enumerate(lengths)], [1] * len(lengths))
    importance = np.full(prompt.n_tokens, np.nan, dtype=np.float32)
    importance[prompt.chunk_positions()] = scores
    return prompt, importance


def chosen(policy: SelectionPolicy, lengths: list[int], scores: list[float], ratio: float) -> list[int]:
    """Selected chunk tokens, counted over chunk tokens alone."""
    prompt, importance = scored(lengths, scores)
    positions = policy.select(prompt, ratio, answers_of(policy, importance)).positions
    return np.searchsorted(prompt.chunk_positions(), positions).tolist()


class TestSpecCachePolicy:
    def test_takes_the_most_important_tokens(self) -> None:
        policy = SpecCachePolicy(complete=False)
        assert chosen(policy, [3, 3], [1, 9, 2, 8, 3, 7], 0.5) == [1, 3, 5]

    def test_ties_go_to_the_earlier_position(self) -> None:
        policy = SpecCachePolicy(complete=False)
        assert chosen(policy, [4, 4], [5, 9, 5, 5, 9, 5, 5, 5], 0.5) == [0, 1, 2, 4]

    def test_completes_a_span(self) -> None:
        scores = [0, 9, 7.5, 8.6, 8.2, 0, 0, 0]
        assert chosen(SpecCachePolicy(complete=False), [8], scores, 3 / 8) == [1, 3, 4]
        assert chosen(SpecCachePolicy(), [8], scores, 3 / 8) == [1, 2, 3, 4]

    def test_no_slack_undoes_completion(self) -> None:
        assert chosen(SpecCachePolicy(completion_slack=0), [8], [0, 9, 7.5, 8.6, 8.2, 0, 0, 0], 3 / 8) == [1, 3, 4]

    def test_the_cap_drops_the_least_important(self) -> None:
        # K = 12 of a span of 16 is a share of 0.75; completion wants all 16, the cap is ceil(1.25 * 12) = 15.
        scores = [0.0] + [10 - 0.1 * i for i in range(16)] + [0.0] * 15
        assert chosen(SpecCachePolicy(), [32], scores, 12 / 32) == list(range(1, 16))

    def test_the_cap_breaks_ties_by_position(self) -> None:
        assert chosen(SpecCachePolicy(), [16], [4.0] * 16, 12 / 16) == list(range(15))

    def test_a_span_stops_at_the_chunk_boundary(self) -> None:
        # One smooth run over two chunks: three of four chosen in the first, none in the second.
        scores = [9.0, 9.0, 9.0, 8.0, 8.0, 8.0, 8.0, 0.0]
        assert chosen(SpecCachePolicy(completion_slack=1), [4, 4], scores, 3 / 8) == [0, 1, 2, 3]
        assert chosen(SpecCachePolicy(completion_slack=1), [8], scores, 3 / 8) == [0, 1, 2]

    @pytest.mark.parametrize(("ratio", "n_chosen"), [(0.0, 0), (1.0, 6)])
    def test_the_ends_need_no_answer(self, ratio: float, n_chosen: int) -> None:
        prompt = make_prompt([make_chunk("a", 6)], [2])
        assert len(SpecCachePolicy().select(prompt, ratio, {}).positions) == n_chosen

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_hole_in_the_importance_is_a_mistake(self, bad: float) -> None:
        prompt, importance = scored([4], [1, 2, bad, 4])
        policy = SpecCachePolicy()
        with pytest.raises(ValueError, match="not finite at 1 chunk tokens, the first at position 3"):
            policy.select(prompt, 0.5, answers_of(policy, importance))

    def test_importance_of_the_wrong_length_is_a_mistake(self) -> None:
        prompt, _ = scored([4], [1, 2, 3, 4])
        policy = SpecCachePolicy()
        with pytest.raises(ValueError, match="shape"):
            policy.select(prompt, 0.5, answers_of(policy, np.ones(4)))

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("tau_smooth", -0.1),
            ("tau_smooth", float("nan")),
            ("tau_smooth", "0.4"),
            ("tau_cover", 1.1),
            ("tau_cover", -0.1),
            ("max_span", 0),
            ("max_span", 2.5),
            ("max_span", True),
            ("completion_slack", -1),
            ("complete", 1),
        ],
    )
    def test_options_out_of_range(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=option):
            SpecCachePolicy(**{option: value})


class TestBaselines:
    def test_the_two_ends_ignore_the_ratio(self) -> None:
        prompt = make_prompt([make_chunk("a", 6), make_chunk("b", 1)], [2, 0])
        assert FullReuse().select(prompt, 0.5, {}).effective_ratio == 0.0
        assert FullRecompute().select(prompt, 0.5, {}).effective_ratio == 1.0
        assert FullReuse.reuses
        assert not FullRecompute.reuses

    def test_random_depends_on_the_seed(self) -> None:
        prompt = make_prompt([make_chunk("a", 60)], [2])
        picks = {tuple(RandomSelection(seed).select(prompt, 0.5, {}).positions) for seed in range(5)}
        assert len(picks) == 5

    def test_random_grows_with_the_ratio(self) -> None:
        prompt = make_prompt([make_chunk("a", 60)], [2])
        few, many = (set(RandomSelection().select(prompt, r, {}).positions) for r in (0.2, 0.6))
        assert len(few) == 12
        assert few < many

    @pytest.mark.parametrize("seed", [-1, 0.5, None])
    def test_random_refuses_a_bad_seed(self, seed: Any) -> None:
        with pytest.raises(ConfigurationError, match="seed"):
            RandomSelection(seed)


@pytest.mark.parametrize("ratio", [-0.01, 1.01, float("nan")])
def test_ratio_outside_its_limits(ratio: float) -> None:
    with pytest.raises(ConfigurationError, match="recompute_ratio"):
        FullReuse().select(make_prompt([make_chunk("a", 6)], [0]), ratio, {})


@pytest.mark.parametrize(
    ("ratio", "n", "k"), [(0.15, 100, 15), (0.15, 101, 16), (0.0, 9, 0), (1.0, 9, 9), (0.01, 3, 1)]
)
def test_budget(ratio: float, n: int, k: int) -> None:
    assert RandomSelection().budget(make_prompt([make_chunk("a", n)], [0]), ratio) == k


@pytest.mark.parametrize(
    ("policy", "model", "kv"),
    [
        (SpecCachePolicy(), True, False),
        (Attended(), True, True),
        (Attended(scorer="target"), False, False),
        (CacheBlend(), False, False),
        (RandomSelection(), False, False),
    ],
    ids=repr,
)
def test_what_a_policy_asks_says_which_models_it_needs(policy: SelectionPolicy, model: bool, kv: bool) -> None:
    assert (policy.needs_speculative_model, policy.needs_speculative_kv) == (model, kv)


@pytest.mark.parametrize("chosen", [None, [0], [10**6], [-1], [0.5]], ids=str)
def test_a_policy_that_chooses_no_chunk_tokens_is_told_so(chosen: Any) -> None:
    class Wrong(SelectionPolicy):
        def choose(self, *_: Any) -> Any:
            return chosen if chosen is None else np.array(chosen)

    with pytest.raises(ConfigurationError, match="Wrong.choose gave .* not positions of chunk tokens"):
        Wrong().select(scored([6], [0.0] * 6)[0], 0.5, {})


def test_a_mask_is_no_selection() -> None:
    class Mask(SelectionPolicy):
        def choose(self, prompt: AssembledPrompt, *_: Any) -> np.ndarray:
            return np.ones(prompt.n_chunk_tokens, dtype=bool)

    with pytest.raises(ConfigurationError, match="Mask.choose gave"):
        Mask().select(scored([6], [0.0] * 6)[0], 0.5, {})


class TestWrappers:
    def test_heads_first_then_what_the_inner_policy_finds_best(self) -> None:
        policy = build_policy("heads(2)+attended")
        assert chosen(policy, [4, 4], [9, 8, 7, 6, 1, 2, 3, 4], 5 / 8) == [0, 1, 2, 4, 5]

    def test_heads_alone_where_the_budget_ends_with_them(self) -> None:
        assert chosen(build_policy("heads(3)+attended"), [4, 4], [0, 0, 0, 9, 0, 0, 0, 9], 3 / 8) == [0, 1, 4]

    def test_a_chunk_shorter_than_its_head(self) -> None:
        assert chosen(build_policy("heads(3)+attended"), [1, 6], [0, 0, 0, 0, 1, 9, 2], 5 / 7) == [0, 1, 2, 3, 5]

    def test_groups_are_taken_whole(self) -> None:
        policy = build_policy("grouped(2)+attended")
        assert chosen(policy, [4, 3], [0, 9, 1, 1, 5, 5, 8], 3 / 7) == [4, 5, 6]
        assert chosen(policy, [4, 3], [0, 9, 1, 1, 4, 4, 2], 2 / 7) == [0, 1]
