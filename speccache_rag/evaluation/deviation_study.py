"""A deviation study: the target is asked how far stored KV is from true KV, in a few layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from speccache_rag.config import SpecCacheConfig
from speccache_rag.evaluation.datasets import Example
from speccache_rag.evaluation.deviation_records import OFFSETS, DeviationRecord
from speccache_rag.evaluation.harness import Evaluation
from speccache_rag.evaluation.scoring_cost import n_layers
from speccache_rag.fingerprint import resolve_model
from speccache_rag.plan.prompt_plan import PromptPlan


def measure(config: SpecCacheConfig, examples: Sequence[Example]) -> Iterator[list[DeviationRecord]]:
    """The records of each example: keys and values in the second layer, at each quarter of the depth, and in the last.

    A layer's deviation costs the target a prefill up to there.
    """
    depth = n_layers(resolve_model(config.model))
    layers = sorted({1, *(round(depth * quarter / 4) for quarter in (1, 2, 3)), depth - 1} - {0})
    with Evaluation(config, []) as evaluation:
        for example in examples:
            runtime = evaluation.runtime(example)
            runtime.warm(example.texts, show_progress=False)
            records = []
            for of in ("value", "key"):
                for layer in layers:
                    plan = runtime.plan(example.messages, policy=f"cacheblend({of}, {layer})", recompute_ratio=0.5)
                    if plan.scores is not None:  # there is a chunk whose KV is not exact
                        records.append(_record(example, evaluation.target, of, layer, plan))
            yield records


def _record(example: Example, target: str, of: str, layer: int, plan: PromptPlan) -> DeviationRecord:
    """The record of a plan whose scores are deviations in one layer."""
    assert plan.scores is not None
    places = [chunk for chunk in plan.reuse.stored if not chunk.exact]
    scores = np.concatenate([plan.scores[chunk.start : chunk.end] for chunk in places])
    offsets = np.concatenate([np.arange(chunk.length) for chunk in places])
    by_offset = []
    for low, high in OFFSETS:
        here = scores[(offsets >= low) & (offsets < high)]
        by_offset.append(float(here.mean()) if len(here) else None)
    return DeviationRecord(example.id, example.dataset, target, of, layer, float(scores.mean()), tuple(by_offset))
