from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_apply
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_apply

from speccache_rag.engines.reuse.rope import RopeTable
from tests.kinds import LLAMA3_ROPE, YARN_ROPE

P, T, H, D = 1024, 7, 3, 32
# A float32 angle near P is right to P * 6e-8, and keys here are as long as 4.
ATOL = 5e-4

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
}
positions = st.integers(0, P - T - 1)


def reference(kind: str) -> LlamaRotaryEmbedding:
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "head_dim": D, "max_position_embeddings": P}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(KINDS[kind])))


@functools.cache
def angles(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own cosines and sines [P, D], both halves equal, YaRN's scale in them."""
    cos, sin = reference(kind)(torch.zeros(1), torch.arange(P)[None])
    return cos[0], sin[0]


@functools.cache
def table_of(kind: str, dtype: torch.dtype = torch.float32) -> RopeTable:
    cos, sin = angles(kind)
    half = D // 2
    return RopeTable.from_cache(torch.cat((cos[:, :half], sin[:, :half]), dim=-1).to(dtype), neox=True)


def at(kind: str, raw: torch.Tensor, start: int) -> torch.Tensor:
    """`raw` keys [T, H, D] as the model writes them at `start`, by transformers' own function."""
    cos, sin = (table[None, start : start + T] for table in angles(kind))
    heads_first = raw.transpose(0, 1)[None]
    return llama_apply(heads_first, heads_first, cos, sin)[1][0].transpose(0, 1)


def raw_keys(seed: int = 0) -> torch.Tensor:
    return torch.randn(T, H, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p", "q"), [(0, 1), (5, 700), (12, 1000), (900, 3), (1000, 0), (77, 76)])
def test_a_moved_key_is_the_key_computed_there(kind: str, p: int, q: int) -> None:
    raw = raw_keys()
    moved = table_of(kind).move(at(kind, raw, p), q - p)
    torch.testing.assert_close(moved, at(kind, raw, q), atol=ATOL, rtol=0)
    # The move is needed: left where they were, the keys are others.
    assert not torch.allclose(at(kind, raw, p), at(kind, raw, q), atol=0.1)


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), p=positions, q=positions, r=positions, seed=st.integers(0, 1000))
def test_two_moves_are_one(kind: str, p: int, q: int, r: int, seed: int) -> None:
    table, keys = table_of(kind), raw_keys(seed)
    torch.testing.assert_close(
        table.move(table.move(keys, q - p), r - q), table.move(keys, r - p), atol=2 * ATOL, rtol=0
    )


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), delta=positions)
def test_a_negative_move_undoes_a_positive_one_and_keeps_lengths(kind: str, delta: int) -> None:
    table, keys = table_of(kind), raw_keys()
    there = table.move(keys, delta)
    torch.testing.assert_close(table.move(there, -delta), keys, atol=1e-5, rtol=0)
    torch.testing.assert_close(there.norm(dim=-1), keys.norm(dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_move_is_the_identity_bit_by_bit(kind: str) -> None:
    keys = raw_keys()
    assert table_of(kind).move(keys, 0).equal(keys)


def test_yarns_scale_is_stripped() -> None:
    scale = reference("yarn").attention_scaling
    assert scale > 1.1
    table = table_of("yarn")
    torch.testing.assert_close(table.cos.square() + table.sin.square(), torch.ones(P, D // 2))
    assert table.cos[0].eq(1).all() and table.sin[0].eq(0).all()


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("delta", [300, -300])
def test_dimensions_beyond_the_rotary_ones_are_left_alone(neox: bool, delta: int) -> None:
    rotary = 12
    cos_sin = torch.cat(
        [f(torch.outer(torch.arange(P), 0.3 ** torch.arange(rotary // 2))) for f in (torch.cos, torch.sin)], 1
    )
    table, keys = RopeTable.from_cache(cos_sin, neox=neox), raw_keys()
    moved = table.move(keys, delta)
    assert moved[..., rotary:].equal(keys[..., rotary:])
    assert moved[..., :rotary].equal(table.move(keys[..., :rotary].contiguous(), delta))
    assert not torch.allclose(moved[..., :rotary], keys[..., :rotary], atol=0.1)


def test_gptj_pairs_neighbours() -> None:
    sin_cos = create_sinusoidal_positions(P, D)
    sin, cos = sin_cos.chunk(2, dim=1)
    table = RopeTable.from_cache(torch.cat((cos, sin), dim=1), neox=False)

    def at_position(raw: torch.Tensor, start: int) -> torch.Tensor:
        here = slice(start, start + T)
        return gptj_apply(raw[None], sin[None, here], cos[None, here])[0]

    raw = raw_keys()
    for p, q in ((4, 900), (900, 4)):
        moved = table.move(at_position(raw, p), q - p)
        torch.testing.assert_close(moved, at_position(raw, q), atol=ATOL, rtol=0)


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(KINDS)), deltas=st.lists(st.integers(-P + 1, P - 1), min_size=T, max_size=T))
def test_each_token_may_move_by_its_own_distance(kind: str, deltas: list[int]) -> None:
    table, keys = table_of(kind), torch.stack([raw_keys(0), raw_keys(1)])
    moved = table.move(keys, torch.tensor(deltas))
    assert moved.shape == keys.shape
    for token, delta in enumerate(deltas):
        torch.testing.assert_close(moved[:, token], table.move(keys[:, token : token + 1], delta)[:, 0], atol=0, rtol=0)


def test_one_distance_for_all_is_the_same_for_each() -> None:
    table, keys = table_of("llama3"), raw_keys()
    assert table.move(keys, torch.full((T,), -9)).equal(table.move(keys, -9))
    assert table.move(keys, torch.zeros(T, dtype=torch.int64)).equal(keys)


def test_leading_dimensions_are_free() -> None:
    table = table_of("default")
    keys = torch.stack([raw_keys(0), raw_keys(1)])
    moved = table.move(keys, 9)
    assert moved.shape == (2, T, H, D)
    assert moved[1].equal(table.move(raw_keys(1), 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_come_back_as_they_came_rounded_once(dtype: torch.dtype) -> None:
    keys = raw_keys().to(dtype)
    table = table_of("llama3")
    moved = table.move(keys, 500)
    assert moved.dtype == dtype
    assert moved.equal(table.move(keys.float(), 500).to(dtype))


def test_the_input_is_not_written_to() -> None:
    keys = raw_keys()
    table_of("default").move(keys, 10)
    assert keys.equal(raw_keys())


@pytest.mark.parametrize("delta", [P, -P, P + 500])
def test_beyond_the_table_is_an_error(delta: int) -> None:
    table = table_of("default")
    assert table.limit == P
    table.move(raw_keys(), (P - 1) * (1 if delta > 0 else -1))
    with pytest.raises(IndexError):
        table.move(raw_keys(), delta)
    with pytest.raises(IndexError):
        table.move(raw_keys(), torch.tensor([0] * (T - 1) + [delta]))


def test_tables_are_float32_whatever_the_cache() -> None:
    table = table_of("default", torch.bfloat16)
    assert table.cos.dtype == table.sin.dtype == torch.float32


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [D, D // 2], ids=["whole", "partial"])
@pytest.mark.parametrize("kind", KINDS)
def test_vllms_own_rotary_embedding_agrees(kind: str, rotary_dim: int, neox: bool) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {**KINDS[kind], "partial_rotary_factor": rotary_dim / D}
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(D, P, neox, parameters, torch.float32)

    def at_position(raw: torch.Tensor, start: int) -> torch.Tensor:
        flat = raw.reshape(T, H * D)
        return rotary.forward_native(torch.arange(start, start + T), flat.clone(), flat.clone())[1].view(T, H, D)

    table = RopeTable.from_cache(rotary.cos_sin_cache, neox=rotary.is_neox_style)
    assert 2 * table.cos.shape[1] == rotary_dim
    raw = raw_keys()
    for p, q in ((3, 640), (640, 3)):
        moved = table.move(at_position(raw, p), q - p)
        torch.testing.assert_close(moved, at_position(raw, q), atol=ATOL, rtol=0)
