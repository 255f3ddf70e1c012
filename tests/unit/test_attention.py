"""Attention of queries on keys, against attention written the slow way."""

from __future__ import annotations

import pytest
import torch

from speccache_rag.engines.reuse.attention import attention_on_keys


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_equals_attention_head_by_head(soft_cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 6, 8, generator=generator)
    keys = torch.randn(10, 2, 8, generator=generator)
    found = attention_on_keys(queries, keys, 0.3, first_position=7, soft_cap=soft_cap)
    for q in range(3):
        most = torch.zeros(10)
        for head in range(6):
            logits = torch.stack([queries[q, head] @ keys[t, head // 3] * 0.3 for t in range(7 + q + 1)])
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            probabilities = torch.zeros(10)
            probabilities[: 7 + q + 1] = logits.softmax(0)
            most = torch.maximum(most, probabilities)
        torch.testing.assert_close(found[q], most)


def test_later_keys_are_not_seen_even_if_they_are_not_numbers() -> None:
    queries, keys = torch.randn(1, 2, 4), torch.randn(5, 2, 4)
    keys[3:] = 1e30
    assert attention_on_keys(queries, keys, 1.0, first_position=2)[0, 3:].tolist() == [0.0, 0.0]
