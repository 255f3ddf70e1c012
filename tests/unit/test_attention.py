"""Attention of queries on keys, against attention written the slow way."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from speccache_rag.engines.reuse import attention
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


@pytest.mark.parametrize("elements", [1, 40, 100])
def test_tiles_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = torch.randn(7, 6, 8), torch.randn(20, 2, 8)
    whole = attention_on_keys(queries, keys, 0.3, first_position=13)
    monkeypatch.setattr(attention, "TILE_ELEMENTS", elements)
    torch.testing.assert_close(attention_on_keys(queries, keys, 0.3, first_position=13), whole)


def test_layers_are_joined_by_their_maximum() -> None:
    queries, keys = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8)
    both = [attention_on_keys(q, k, 0.3, first_position=6) for q, k in zip(queries, keys, strict=True)]
    joined = attention_on_keys(queries[1], keys[1], 0.3, first_position=6, most=both[0].clone())
    torch.testing.assert_close(joined, torch.maximum(*both))


MEASURED = """
import resource, torch
from speccache_rag.engines.reuse.attention import QUERY_TOKENS, attention_on_keys
torch.set_num_threads(1)
queries = torch.randn(QUERY_TOKENS, 12, 128).bfloat16()
keys = torch.randn(8000, 2, 128).bfloat16()
attention_on_keys(queries[:1], keys[:10], 0.1, first_position=9)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention_on_keys(queries, keys, 0.1, first_position=8000 - QUERY_TOKENS)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage on Windows")
def test_a_long_query_over_many_keys_stays_below_100_mb() -> None:
    # The logits of 256 rows of 12 heads over 8,000 keys at once would take 98 MB, and a softmax of them as much again.
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    kibibytes = int(done.stdout) if sys.platform != "darwin" else int(done.stdout) // 1024
    assert kibibytes * 1024 < 100e6
