"""Sparse forwards must not change what the model runner has built for its own step; no GPU is needed to see it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.utils import AttentionGroup

from speccache_rag.engines.vllm.worker.builders import own_group, own_groups
from tests.unit.attention_groups import PlainBackend, SmallBlocks, config, group

BLOCK_SIZE = 16


def common(lengths: list[int], ends: list[int]) -> CommonAttentionMetadata:
    """A batch: so many query tokens, and so many keys, of each sequence."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    seq_lens = torch.tensor(ends).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        block_table_tensor=torch.arange(4).repeat(len(lengths), 1).int(),
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
        causal=True,
    )


STEP = common([1, 1, 1, 30], [33, 44, 55, 60])
SPARSE = common([1, 2, 1, 3, 1, 2], [10, 20, 30, 40, 50, 60])


def tensors_of(metadata: Any) -> dict[str, torch.Tensor]:
    found = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def copies_of(metadata: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(metadata).items()}


def unchanged(metadata: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(metadata).items())


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner with FlashAttention 3's builder and full CUDA graphs, as on a Hopper GPU; the kernel helper is ours."""

    def schedule(*, batch_size: int, **_: Any) -> torch.Tensor:
        # Like the real one: some numbers for each sequence, others for other batches.
        return torch.arange(1 + -(-batch_size // 4) * 4 * 4, dtype=torch.int32) + 1000 * batch_size

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", schedule, raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(flash_attn, "get_dcp_world_size_and_rank", lambda _: (1, 0))
    monkeypatch.setattr(flash_attn, "get_num_attention_heads_from_layers", lambda *_: 8)
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda _: set())
    settings = config(max_tokens=256)
    settings.model_config = SimpleNamespace(
        max_model_len=1024, rswa_window=None, is_mm_prefix_lm=False, hf_config=SimpleNamespace(model_type="llama")
    )
    settings.cache_config = SimpleNamespace(cache_dtype="auto")
    settings.attention_config = SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32)
    settings.kernel_config = SimpleNamespace(enable_jit_warmup=False)
    settings.parallel_config.cp_kv_cache_interleave_size = 1
    settings.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, max_cudagraph_capture_size=256)
    made = _group(settings)
    return SimpleNamespace(vllm_config=settings, device=torch.device("cpu"), attn_groups=[[made]])


def _group(settings: Any) -> AttentionGroup:
    backend = type("Backend", (PlainBackend,), {"builder": flash_attn.FlashAttentionMetadataBuilder})
    return group(backend, settings, BLOCK_SIZE)


def test_building_again_on_one_flash_attention_builder_changes_what_it_built_before(runner: Any) -> None:
    """Why sparse forwards need builders of their own; should vLLM mend this, it shows here."""
    (theirs,) = runner.attn_groups[0]
    step = theirs.build_metadata(STEP)
    before = copies_of(step)
    theirs.build_metadata(SPARSE)
    assert not unchanged(step, before)


def test_a_sparse_forwards_metadata_leaves_the_steps_alone(runner: Any) -> None:
    (theirs,), (ours,) = runner.attn_groups[0], own_groups(runner)
    step = theirs.build_metadata(STEP)
    before = copies_of(step)
    sparse = ours.build_metadata(SPARSE)
    assert unchanged(step, before)
    buffers = {t.untyped_storage().data_ptr() for t in theirs.get_metadata_builder().__dict__.values() if _tensor(t)}
    assert buffers, "the builder has no buffer: the test shows nothing"
    for name, tensor in tensors_of(sparse).items():
        assert tensor.untyped_storage().data_ptr() not in buffers, name


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def test_an_own_group_is_like_the_runners_and_shares_no_builder(runner: Any) -> None:
    (theirs,), (ours,) = runner.attn_groups[0], own_groups(runner)
    assert (ours.backend, ours.layer_names, ours.kv_cache_spec) == (
        theirs.backend,
        theirs.layer_names,
        theirs.kv_cache_spec,
    )
    (own,), (runners,) = ours.metadata_builders, theirs.metadata_builders
    assert own is not runners
    assert type(own) is type(runners)
    assert own.kv_cache_spec == runners.kv_cache_spec
    assert len(theirs.metadata_builders) == 1, "the runner's group is as it was"


def test_kernel_block_tables_are_apart() -> None:
    settings = config(max_tokens=64)
    theirs = group(SmallBlocks, settings, 4)
    ours = own_group(theirs, SimpleNamespace(vllm_config=settings, device=torch.device("cpu")))
    assert ours.kernel_block_size == theirs.kernel_block_size == 2
    step = theirs.build_metadata(STEP)
    before = copies_of(step)
    sparse = ours.build_metadata(SPARSE)
    assert unchanged(step, before)
    assert sparse.block_table_tensor.tolist() == [list(range(8))] * 6
