"""What scoring costs, in tokens of the target: so many of its prompt tokens take as much arithmetic."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

from safetensors import safe_open

from speccache_rag.config import Scoring
from speccache_rag.fingerprint import resolve_model
from speccache_rag.scoring.questions import Importance, KVDeviation, Question

OUTSIDE = ("embed", "wte", "wpe", "lm_head")
"""Weights a token does not pass through on its way to KV: tables, and the head."""


def scoring_tokens(
    question: Question,
    *,
    target: str,
    speculative: str | None,
    scoring: Scoring,
    prompt_tokens: int,
    region_tokens: int,
    uncached_tokens: int,
) -> float:
    """The cost of one question about one prompt.

    Args:
        question: what the policy asks.
        target: the target model, a folder or hub id.
        speculative: the speculative model, likewise.
        scoring: how importance is scored.
        prompt_tokens: length of the prompt.
        region_tokens: of it, those of the reuse region.
        uncached_tokens: of the prompt, those in no stored chunk.
    """
    if isinstance(question, KVDeviation):
        return region_tokens * (question.layer + 1) / n_layers(resolve_model(target))
    if isinstance(question, Importance):
        read = prompt_tokens if scoring == "online" else 0
        return read * _share(speculative, target)
    share = _share(speculative, target) if question.scorer == "speculative" else 1.0
    return uncached_tokens * share


def _share(model: str | None, of: str) -> float:
    """A token's arithmetic in one model as a share of its arithmetic in another."""
    return 0.0 if model is None else decoder_parameters(resolve_model(model)) / decoder_parameters(resolve_model(of))


@cache
def decoder_parameters(folder: Path) -> int:
    """Weights that every token of a prompt passes through, by the headers of a model's safetensors files."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if not any(part in name for part in OUTSIDE):
                    total += math.prod(weights.get_slice(name).get_shape())
    return total


@cache
def n_layers(folder: Path) -> int:
    """Layers of the model in a folder."""
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])
