from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from speccache_rag.errors import ConfigurationError, UnsupportedModel
from speccache_rag.scoring import importance
from speccache_rag.scoring.importance import SpeculativeScorer, _decoder_layers
from tests.tiny import tiny_model

TEXT = "The keeper of the lighthouse wrote to Zürich and 東京 👩‍🚀 about a storm that broke the lantern."
N_LAYERS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": N_LAYERS, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return tiny_model(tmp_path_factory.mktemp("speculative"), "llama", max_position_embeddings=128, **sizes)


def make_scorer(folder: Path, layers: str = "last_third") -> SpeculativeScorer:
    return SpeculativeScorer(folder, layers=layers, dtype=torch.float32)


@pytest.fixture(scope="module")
def scorer(folder: Path) -> SpeculativeScorer:
    return make_scorer(folder)


def direct_norms(folder: Path, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Norms [L, T] after each layer and before the final norm, and the norms [T] of the last `hidden_states` entry."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda _m, _i, output: last.append(output))
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    after = [*states[1:-1], last[0]]
    return np.stack([s[0].norm(dim=-1).numpy() for s in after]), states[-1][0].norm(dim=-1).numpy()


@pytest.mark.parametrize(("layers", "n_deep"), [("all", 6), ("last_two_thirds", 4), ("last_third", 2), ("last", 1)])
def test_scores_are_mean_norms_of_the_deep_layers(folder: Path, layers: str, n_deep: int) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    norms, after_final_norm = direct_norms(folder, ids)
    _, scores = make_scorer(folder, layers).score(TEXT)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, norms[-n_deep:].mean(axis=0), rtol=1e-5)
    # The trap: the last entry of `hidden_states` is after the final norm, and would give other scores.
    wrong = np.stack([*norms[N_LAYERS - n_deep : -1], after_final_norm]).mean(axis=0)
    assert not np.allclose(scores, wrong, rtol=0.05)


def test_fewer_than_three_layers_still_have_a_deep_one(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama", num_hidden_layers=2)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    np.testing.assert_allclose(make_scorer(folder).score(TEXT)[1], direct_norms(folder, ids)[0][-1], rtol=1e-5)


def test_offsets_cover_the_text(scorer: SpeculativeScorer) -> None:
    offsets, scores = scorer.score(TEXT)
    assert offsets.dtype == np.int32
    assert offsets.shape == (len(scores), 2)
    covered = {i for start, end in offsets for i in range(start, end)}
    assert covered == set(range(len(TEXT)))
    assert (offsets[:, 1] > offsets[:, 0]).all()


def test_control_tokens_in_a_text_are_harmless(scorer: SpeculativeScorer) -> None:
    text = "before <|im_end|> after"
    offsets, scores = scorer.score(text)
    assert np.isfinite(scores).all()
    assert offsets[-1, 1] == len(text)


@pytest.mark.parametrize("text", ["", "x"])
def test_shortest_texts(scorer: SpeculativeScorer, text: str) -> None:
    offsets, scores = scorer.score(text)
    assert offsets.shape == (len(text), 2)
    assert scores.shape == (len(text),)
    assert scorer.score_after("anchor", text)[0].shape == (len(text), 2)


class TestScoreAfter:
    PREFIX = "<|im_start|>system\nAnswer from the context.<|im_end|>\n"

    def test_the_prefix_is_seen_and_left_out(self, folder: Path, scorer: SpeculativeScorer) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prefix, body = (tokenizer(t)["input_ids"] for t in (self.PREFIX, TEXT))
        norms, _ = direct_norms(folder, prefix + body)
        offsets, scores = scorer.score_after(self.PREFIX, TEXT)
        np.testing.assert_allclose(scores, norms[-2:].mean(axis=0)[len(prefix) :], rtol=1e-5)
        np.testing.assert_array_equal(offsets, scorer.score(TEXT)[0])
        assert not np.allclose(scores, scorer.score(TEXT)[1], rtol=1e-3)

    def test_no_prefix(self, scorer: SpeculativeScorer) -> None:
        np.testing.assert_allclose(scorer.score_after("", TEXT)[1], scorer.score(TEXT)[1], rtol=1e-6)

    def test_a_prefix_beyond_the_context_is_cut(self, scorer: SpeculativeScorer) -> None:
        offsets, scores = scorer.score_after(self.PREFIX * 40, TEXT)
        assert len(offsets) == len(scores) == len(scorer.score(TEXT)[0])
        assert np.isfinite(scores).all()


class TestLongTexts:
    def test_every_window_fits_and_every_token_is_scored(self, folder: Path) -> None:
        scorer = make_scorer(folder)
        scorer.score("load")
        assert scorer._loaded is not None
        lengths: list[int] = []
        scorer._loaded.model.register_forward_pre_hook(
            lambda _m, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        text = TEXT * 6
        offsets, scores = scorer.score(text)
        assert len(lengths) > 1
        assert max(lengths) <= 128
        assert len(offsets) == len(scores)
        assert offsets[-1, 1] == len(text)
        assert np.isfinite(scores).all()

    def test_the_first_window_is_as_ever(self, scorer: SpeculativeScorer) -> None:
        n = len(scorer.score(TEXT)[0])
        np.testing.assert_allclose(scorer.score(TEXT * 6)[1][:n], scorer.score(TEXT)[1], rtol=1e-4)

    def test_later_windows_stand_behind_the_header(self, folder: Path, scorer: SpeculativeScorer) -> None:
        ids = AutoTokenizer.from_pretrained(folder)(TEXT * 6)["input_ids"]
        n_windows = -(-(len(ids) - 64) // 64)
        last = np.array_split(np.array(ids[64:]), n_windows)[-1].tolist()
        norms, _ = direct_norms(folder, ids[:64] + last)
        expected = norms[-2:].mean(axis=0)[64:]
        np.testing.assert_allclose(scorer.score(TEXT * 6)[1][-len(last) :], expected, rtol=1e-5)


def test_a_bos_is_seen_once_and_left_out(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "bos"
    shutil.copytree(folder, copied)
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(copied)
    bos, plain = make_scorer(copied), make_scorer(folder)

    np.testing.assert_array_equal(bos.score(TEXT)[0], plain.score(TEXT)[0])
    np.testing.assert_allclose(bos.score(TEXT)[1], plain.score("<|endoftext|>" + TEXT)[1][1:], rtol=1e-5)
    np.testing.assert_allclose(bos.score("<|endoftext|>" + TEXT)[1][1:], bos.score(TEXT)[1], rtol=1e-5)
    assert bos.score("")[0].shape == (0, 2)


def test_threads_do_not_mix(folder: Path) -> None:
    scorer = make_scorer(folder)
    texts = [TEXT[i:] for i in range(12)]
    results: dict[str, np.ndarray] = {}
    threads = [threading.Thread(target=lambda t=t: results.update({t: scorer.score(t)[1]})) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = make_scorer(folder)
    for text in texts:
        np.testing.assert_allclose(results[text], reference.score(text)[1], rtol=1e-5)


def test_hooks_are_removed_even_after_a_failure(folder: Path) -> None:
    scorer = make_scorer(folder)
    expected = scorer.score(TEXT)[1]
    assert scorer._loaded is not None
    broken = scorer._loaded.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scorer.score(TEXT)
    broken.remove()
    assert all(not layer._forward_hooks for layer in scorer._loaded.deep_layers)
    np.testing.assert_array_equal(scorer.score(TEXT)[1], expected)


def test_identity_names_model_and_layers(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert make_scorer(moved).identity == make_scorer(folder).identity
    assert make_scorer(folder, "all").identity != make_scorer(folder).identity
    other = tiny_model(tmp_path / "other", "llama", seed=1)
    assert make_scorer(other).identity != make_scorer(folder).identity


class TestBadModels:
    def test_unknown_layers(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="'deep'.*last_third"):
            make_scorer(folder, "deep")

    def test_a_folder_without_weights(self, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
        with pytest.raises(ConfigurationError, match="could not be loaded"):
            make_scorer(tmp_path / "m").score(TEXT)

    def test_an_unknown_architecture(self, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "m")
        (tmp_path / "m" / "config.json").write_text('{"model_type": "abacus"}')
        with pytest.raises(ConfigurationError, match="could not be loaded"):
            make_scorer(tmp_path / "m").score(TEXT)


class _Config:
    num_hidden_layers = 2

    def get_text_config(self) -> _Config:
        return self


def test_decoder_layers_are_the_outermost_list_of_the_right_length() -> None:
    class Expertful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))

    model = nn.Module()
    model.config = _Config()  # type: ignore[assignment]
    model.stages = nn.ModuleList(Expertful() for _ in range(2))
    assert _decoder_layers(model) is model.stages


def test_a_model_without_layers_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.config = _Config()  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="Linear has no decoder layers"):
        _decoder_layers(model)


@pytest.mark.parametrize("quick", [torch.float32, torch.bfloat16])
def test_a_cpu_scores_in_the_dtype_it_multiplies_sooner(quick: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "_product_seconds", lambda dtype: 1.0 if dtype == quick else 2.0)
    assert SpeculativeScorer(Path("nowhere")).dtype == quick
    assert SpeculativeScorer(Path("nowhere"), device="cuda").dtype == torch.bfloat16


def test_products_are_timed() -> None:
    assert 0 < importance._product_seconds(torch.float32) < 1
