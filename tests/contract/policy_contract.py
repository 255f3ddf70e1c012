"""What every selection policy must keep. A third party subclasses `PolicyContract` for its own."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speccache_rag.selection.base import Answers, SelectionPolicy
from speccache_rag.types import AssembledPrompt, Chunk, ChunkKey, Placement, Selection

FRESH_ID, QUERY_TOKENS = 1, 5


def answers_of(policy: SelectionPolicy, scores: np.ndarray) -> Answers:
    """The same scores for everything the policy asks."""
    return dict.fromkeys(policy.questions(), scores)


def make_chunk(name: str, n_tokens: int) -> Chunk:
    """A chunk of one-character tokens."""
    ids = tuple(range(10, 10 + n_tokens))
    offsets = np.array([(i, i + 1) for i in range(n_tokens)], dtype=np.int32).reshape(-1, 2)
    return Chunk(ChunkKey(name), "x" * n_tokens, ids, offsets)


def make_prompt(chunks: list[Chunk], gaps: list[int]) -> AssembledPrompt:
    """`gaps[i]` fresh tokens, then `chunks[i]`, and so on; the query comes last."""
    ids: list[int] = []
    placements = []
    for chunk, gap in zip(chunks, gaps, strict=True):
        ids += [FRESH_ID] * gap
        placements.append(Placement(chunk, len(ids), chunk.n_tokens))
        ids += chunk.token_ids
    ids += [FRESH_ID] * QUERY_TOKENS
    offsets = np.array([(i, i + 1) for i in range(len(ids))], dtype=np.int32)
    return AssembledPrompt("x" * len(ids), tuple(ids), offsets, tuple(placements))


@st.composite
def scored_prompts(draw: st.DrawFn) -> tuple[AssembledPrompt, np.ndarray]:
    """Prompts of up to six chunks, one-token ones and repeats among them, with scores rich in ties."""
    known = [make_chunk(str(i), n) for i, n in enumerate(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))]
    chunks = draw(st.lists(st.sampled_from(known), max_size=6))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(chunks), max_size=len(chunks)))
    prompt = make_prompt(chunks, gaps)
    levels = draw(st.sampled_from([1, 3, 1000]))
    scores = np.random.default_rng(draw(st.integers(0, 99))).integers(0, levels, prompt.n_tokens).astype(np.float32)
    outside = np.ones(prompt.n_tokens, dtype=bool)
    outside[prompt.chunk_positions()] = False
    scores[outside] = np.nan
    return prompt, scores


ratios = st.one_of(st.sampled_from([0.0, 0.15, 0.3, 1.0]), st.floats(0, 1))
contract = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class PolicyContract:
    """Subclass it, name the policy, and every law below is tested."""

    policy: SelectionPolicy
    follows_ratio: bool = True
    """False for the two ends, which choose the same whatever the ratio."""
    slack: float = 0.0
    """Documented share of K by which the policy may pass its budget."""

    @contract
    @given(scored_prompts(), ratios)
    def test_sorted_unique_and_inside_chunks(self, case: tuple[AssembledPrompt, np.ndarray], ratio: float) -> None:
        prompt, scores = case
        positions = self._select(prompt, ratio, scores).positions
        assert positions.dtype == np.int64
        assert (np.diff(positions) > 0).all()
        assert np.isin(positions, prompt.chunk_positions()).all()

    @contract
    @given(scored_prompts(), ratios)
    def test_within_budget(self, case: tuple[AssembledPrompt, np.ndarray], ratio: float) -> None:
        prompt, scores = case
        selection = self._select(prompt, ratio, scores)
        k = math.ceil(ratio * prompt.n_chunk_tokens - 1e-9)
        assert selection.recompute_ratio == ratio
        assert selection.n_chunk_tokens == prompt.n_chunk_tokens
        if self.follows_ratio:
            cap = math.ceil((1 + self.slack) * k - 1e-9)
            assert min(k, prompt.n_chunk_tokens) <= len(selection.positions) <= min(cap, prompt.n_chunk_tokens)

    @contract
    @given(scored_prompts(), ratios)
    def test_deterministic(self, case: tuple[AssembledPrompt, np.ndarray], ratio: float) -> None:
        prompt, scores = case
        twin = make_prompt([p.chunk for p in prompt.placements], self._gaps(prompt))
        first = self._select(prompt, ratio, scores).positions
        other = type(self.policy)(**vars(self.policy))
        again = other.select(twin, ratio, answers_of(other, scores.copy()))
        assert first.tolist() == again.positions.tolist()

    @contract
    @given(scored_prompts())
    def test_the_two_ends(self, case: tuple[AssembledPrompt, np.ndarray]) -> None:
        prompt, scores = case
        if self.follows_ratio:
            assert len(self._select(prompt, 0.0, scores).positions) == 0
            assert self._select(prompt, 1.0, scores).positions.tolist() == prompt.chunk_positions().tolist()
        else:
            low, high = (self._select(prompt, ratio, scores).positions for ratio in (0.0, 1.0))
            assert low.tolist() == high.tolist()

    @contract
    @given(scored_prompts(), ratios)
    def test_input_is_left_alone(self, case: tuple[AssembledPrompt, np.ndarray], ratio: float) -> None:
        prompt, scores = case
        before = scores.copy()
        self._select(prompt, ratio, scores)
        np.testing.assert_array_equal(scores, before)

    def test_a_prompt_without_chunks(self) -> None:
        selection = self._select(make_prompt([], []), 0.5, np.full(QUERY_TOKENS, np.nan))
        assert len(selection.positions) == 0
        assert selection.effective_ratio == 0.0

    @contract
    @given(scored_prompts(), ratios)
    def test_asks_nothing_where_nothing_is_chosen(self, case: tuple[AssembledPrompt, np.ndarray], ratio: float) -> None:
        prompt, scores = case
        asked = self.policy.questions_about(prompt, ratio)
        assert asked in ((), self.policy.questions())
        if not asked:
            expected = self._select(prompt, ratio, scores).positions
            assert self.policy.select(prompt, ratio, {}).positions.tolist() == expected.tolist()

    def _select(self, prompt: AssembledPrompt, ratio: float, scores: np.ndarray) -> Selection:
        return self.policy.select(prompt, ratio, answers_of(self.policy, scores))

    @staticmethod
    def _gaps(prompt: AssembledPrompt) -> list[int]:
        ends = [0, *(p.end for p in prompt.placements)]
        return [p.start - end for p, end in zip(prompt.placements, ends, strict=False)]
