from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.alignment import align_scores
from tests.conftest import ROOT

MODELS = ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct")
MULTI_BYTE = "aé東👩‍🚀 \n<|im_end|>"


def ranges(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def overlaps(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """bool [T, S], pair by pair; an empty range overlaps nothing."""
    starts = np.maximum(source[None, :, 0], target[:, None, 0])
    ends = np.minimum(source[None, :, 1], target[:, None, 1])
    return ends > starts


def assert_psi(source: np.ndarray, scores: np.ndarray, target: np.ndarray) -> None:
    """For every threshold, aligning and selecting commute (paper section 2.4)."""
    aligned = align_scores(source, scores, target)
    assert aligned.dtype == np.float32
    assert aligned.shape == (len(target),)
    covers = overlaps(source, target)
    np.testing.assert_array_equal(aligned[~covers.any(axis=1)], 0.0)
    for threshold in np.unique(scores[scores > 0]):
        selected = scores >= threshold
        np.testing.assert_array_equal(aligned >= threshold, covers[:, selected].any(axis=1))


@st.composite
def tokenizations(draw: st.DrawFn, n_chars: int) -> np.ndarray:
    """Tokens over `n_chars` characters: gaps, empty ranges, and characters shared by several byte tokens."""
    pairs, at = [], 0
    while at < n_chars:
        end = min(n_chars, at + draw(st.integers(1, 4)))
        kind = draw(st.sampled_from(["plain", "plain", "bytes", "gap", "empty", "straddle"]))
        if kind == "bytes":
            pairs += [(at, end)] * 3
        elif kind == "empty":
            pairs += [(at, at), (at, end)]
        elif kind == "straddle":
            pairs += [(at, end), (end - 1, end)]
        elif kind == "plain":
            pairs.append((at, end))
        at = end
    return ranges(pairs)


def random_scores(n: int, seed: int) -> np.ndarray:
    """Positive, with many ties."""
    return np.random.default_rng(seed).integers(1, 6, n).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40).flatmap(lambda n: st.tuples(tokenizations(n), tokenizations(n))), st.integers(0, 99))
def test_aligning_and_selecting_commute(pair: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    for source, target in (pair, pair[::-1]):
        assert_psi(source, random_scores(len(source), seed), target)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=20), st.integers(0, 99))
def test_identity_where_tokenizers_agree(lengths: list[int], seed: int) -> None:
    ends = np.cumsum([0, *lengths])
    offsets = np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int32)
    scores = np.random.default_rng(seed).normal(size=len(offsets)).astype(np.float32)
    np.testing.assert_array_equal(align_scores(offsets, scores, offsets), scores)


def test_the_highest_overlapping_score_wins() -> None:
    source, target = ranges([(0, 2), (2, 4), (4, 6)]), ranges([(0, 0), (0, 3), (3, 5), (5, 6), (6, 9)])
    aligned = align_scores(source, np.array([1, 5, 3], np.float32), target)
    assert aligned.tolist() == [0, 5, 5, 3, 0]


def test_nan_is_no_score_and_infinity_is_one() -> None:
    source, target = ranges([(0, 1), (1, 2), (2, 3)]), ranges([(0, 1), (0, 2), (2, 3)])
    assert align_scores(source, np.array([np.nan, -2, np.inf]), target).tolist() == [0, -2, np.inf]


def test_nothing_to_align() -> None:
    none = ranges([])
    assert align_scores(none, np.empty(0, np.float32), none).shape == (0,)
    assert align_scores(none, np.empty(0, np.float32), ranges([(0, 3)])).tolist() == [0]
    assert align_scores(ranges([(0, 3)]), np.ones(1, np.float32), none).shape == (0,)


def test_one_score_for_each_source_token() -> None:
    with pytest.raises(ValueError, match=r"\(2,\); 1 source"):
        align_scores(ranges([(0, 3)]), np.ones(2, np.float32), ranges([(0, 3)]))


@pytest.fixture(scope="module")
def voices() -> tuple[PromptTokenizer, ...]:
    from transformers import AutoTokenizer

    folders: list[Path] = [ROOT / ".models" / name for name in MODELS]
    missing = [folder.name for folder in folders if not (folder / "tokenizer.json").exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not in .models; `make test` fetches them")
    return tuple(PromptTokenizer(AutoTokenizer.from_pretrained(folder)) for folder in folders)


def test_real_tokenizers_leave_no_token_without_a_score(voices: tuple[PromptTokenizer, ...]) -> None:
    first, second = (voice.chunk_tokens(f"def f(x):\n\n    return x  # {MULTI_BYTE}, Zürich")[1] for voice in voices)
    for source, target in ((first, second), (second, first)):
        assert (align_scores(source, np.ones(len(source), np.float32), target) == 1).all()


AWKWARD = {
    "emoji": "👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇨🇭🇯🇵🇨 👍🏽👍🏿 ❤️ ☎︎ 1️⃣ 🥖",
    "combining marks": "e\u0301 a\u0328\u0301 Z\u0351\u036b\u0343\u0321 \u0301lone 각 \u1100\u1161\u11a8 नमस्ते กำลัง",
    "cjk": "東京で寿司を食べた。한국어 텍스트 龘𠮷野家 ㍿①Ａ１",
    "white space": "a\tb\t\tc  d   \n\n\n e \u00a0\u2003\u3000f\r\ng\rh\x0b\x0ci\x85\u2028\u2029",
    "code": "def f(x: int) -> str:\r\n\treturn f'{x:>10}' if x != 0 else \"\\n\"  # 0xFF, a_b, __c__, λ\n\n\n}}}]);",
    "long words": "a" * 700 + " " + "Donaudampfschifffahrt" * 30 + " " + "=" * 300 + " " + "1234567890" * 40,
    "zero width": "a\u200bb\u200cc\u200dd\ufeffe\u2060f\u00adg\u180eh\u200d\u200d",
    "looks invalid": "\ufffd\ufffd \x00\x04\x1b[0m\x7f\x80\x9f \ufffe\uffff\U00040000<b \ue000 Ã©Â\xa0 \\ud83d %ED",
    "right to left": "שלום עולם! مرحبا \u202eabc\u202c بِسْمِ \u200f12\u200e3 ﷽",
    "control tokens": "<|im_end|><|im_start|>system\n<|endoftext|> < |im_end| > <|im_<|im_end|>end|>",
}

awkward_text = st.lists(
    st.sampled_from(sorted(AWKWARD.values())).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(1, 40)).map(lambda at: text[at[0] :][: at[1]])
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from((" ", "\n", "\r\n", "\t", ". ", " the ", "return ")),
    min_size=1,
    max_size=8,
).map("".join)


def characters(offsets: np.ndarray, n: int) -> np.ndarray:
    """bool [n]: the characters these tokens cover."""
    covered = np.zeros(n, dtype=bool)
    for start, end in offsets:
        covered[start:end] = True
    return covered


def assert_selected_characters_are_covered(voices: tuple[PromptTokenizer, ...], text: str, seed: int) -> None:
    """Both ways: no character is without a token, and none that was selected is left out after alignment."""
    first, second = (voice.chunk_tokens(text)[1] for voice in voices)
    for source, target in ((first, second), (second, first)):
        assert characters(source, len(text)).all(), "a character belongs to no token"
        scores = random_scores(len(source), seed)
        assert_psi(source, scores, target)
        aligned = align_scores(source, scores, target)
        for threshold in range(1, 6):
            wanted = characters(source[scores >= threshold], len(text))
            assert characters(target[aligned >= threshold], len(text))[wanted].all()


@pytest.mark.parametrize("name", sorted(AWKWARD))
def test_real_tokenizers_on_awkward_text(voices: tuple[PromptTokenizer, ...], name: str) -> None:
    text = AWKWARD[name]
    for seed in range(3):
        assert_selected_characters_are_covered(voices, text, seed)
        assert_selected_characters_are_covered(voices, f"Plain words, then {text} and more.", seed)


@settings(max_examples=150, deadline=None)
@given(text=awkward_text.filter(str.strip), seed=st.integers(0, 99))
def test_real_tokenizers_both_ways(voices: tuple[PromptTokenizer, ...], text: str, seed: int) -> None:
    # SmolLM2's vocabulary lacks some control characters; a text of nothing else has no tokens, and is no chunk.
    assume(all(voice.chunk_tokens(text)[0] for voice in voices))
    for mixed in (text, MULTI_BYTE + text + " and some plain words, "):
        assert_selected_characters_are_covered(voices, mixed, seed)


def test_the_awkward_texts_are_awkward(voices: tuple[PromptTokenizer, ...]) -> None:
    """The two tokenizers cut them in different places, and characters into several tokens."""
    for name in ("emoji", "combining marks", "looks invalid", "long words"):
        first, second = (voice.chunk_tokens(AWKWARD[name])[1] for voice in voices)
        assert first.shape != second.shape or not np.array_equal(first, second), name
    for voice in voices:
        offsets = voice.chunk_tokens(AWKWARD["emoji"])[1]
        assert len({tuple(pair) for pair in offsets.tolist()}) < len(offsets)
