from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.options import checked
from speccache_rag.engines.transformers.sampling import Sampler, SamplingOptions
from speccache_rag.errors import (
    ConfigurationError,
)
from tests.unit.transformers_engine.serving import answer, request, started, text_of


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"best_of": 3}, "Unknown sampling option 'best_of'.*temperature"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ["a", ""]}, "stop is ''"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_a_bad_sampling_option_is_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        checked(SamplingOptions, "sampling", sampling)


def test_sampling_defaults_are_those_of_vllm() -> None:
    options = checked(SamplingOptions, "sampling", {"max_tokens": None, "stop": "\n"})
    assert (options.max_tokens, options.temperature, options.top_p, options.stop) == (None, 1.0, 1.0, ("\n",))


LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(n: int = 400, **sampling: Any) -> Counter[int]:
    sampler = Sampler(SamplingOptions(**{"seed": 1, **sampling}), {0})
    return Counter(sampler.choose(LOGITS, [])[0] for _ in range(n))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "min_tokens": 1}, {1}),
        ({"min_tokens": 1}, {1, 2, 3}),
    ],
)
def test_which_tokens_can_be_drawn(sampling: dict[str, Any], possible: set[int]) -> None:
    assert set(drawn(**sampling)) == possible


def test_tokens_are_drawn_by_their_probability_at_the_temperature() -> None:
    counts = drawn(4000, temperature=0.5)
    expected = torch.softmax(LOGITS / 0.5, -1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_logprobs_are_the_models_own_and_hold_the_chosen_token() -> None:
    sampler = Sampler(SamplingOptions(temperature=0.0, logprobs=2, min_tokens=1), {0})
    token, logprobs = sampler.choose(LOGITS, [])
    assert token == 1
    assert logprobs == pytest.approx({0: np.log(0.5), 1: np.log(0.3)}, abs=1e-6)
    rare = Sampler(SamplingOptions(temperature=0.0, logprobs=1, min_tokens=1), {0, 1})
    assert set(rare.choose(LOGITS, [])[1] or {}) == {0, 2}


def test_a_seed_repeats_and_no_seed_does_not(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> list[str]:
        seeds = (7, 7, 8, None, None)
        return [text_of(await answer(engine, request(temperature=2.0, seed=s, max_tokens=24))) for s in seeds]

    a, b, c, d, e = started(tiny_folder, use)
    assert a == b
    assert len({a, c, d, e}) == 4
