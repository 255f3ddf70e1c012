from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from speccache_rag.engines.reuse import selfcheck as proofs
from speccache_rag.engines.transformers import model as model_module
from speccache_rag.engines.transformers import support
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.selfcheck import self_check
from speccache_rag.engines.transformers.support import check_config
from speccache_rag.errors import (
    SelfCheckFailed,
)
from tests.tiny import SIZES, _randomize, tiny_tokenizer
from tests.unit.transformers_engine.serving import started


def test_bfloat16_and_eager_attention_pass_the_self_check(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> str:
        return engine.facts.dtype

    assert started(tiny_folder, use, dtype="bfloat16", attn_implementation="eager") == "bfloat16"


def made(config_class: Any, model_class: Any, tmp_path: Path, **options: Any) -> TargetModel:
    tokenizer = tiny_tokenizer(tmp_path)
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = config_class(**{**SIZES, **special, **options})
    check_config("it", config)
    model = model_class(config).float().eval()
    _randomize(model, 0)
    return TargetModel(model, tokenizer, 512)


@pytest.mark.parametrize(
    ("config_class", "model_class", "share", "neox"),
    [
        (GPTNeoXConfig, GPTNeoXForCausalLM, 0.25, True),
        (PhiConfig, PhiForCausalLM, 0.5, True),
        (CohereConfig, CohereForCausalLM, 1.0, False),
        (GlmConfig, GlmForCausalLM, 0.5, False),
    ],
)
def test_partial_rotary_and_neighbour_pairs_pass_the_self_check(
    config_class: Any, model_class: Any, share: float, neox: bool, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    target = made(config_class, model_class, tmp_path, rope_parameters=rope)
    assert target.rope.neox is neox
    assert target.rope.cos.shape == (512, int(32 * share) // 2)
    self_check(target)


def test_the_self_check_refuses_a_rotation_the_table_does_not_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM's module gives angles like Llama's and then pairs neighbours, which only its own function shows."""
    monkeypatch.setattr(support, "_rotation_of", lambda model: None)
    with pytest.raises(SelfCheckFailed, match="Positional recovery by 463"):
        self_check(made(GlmConfig, GlmForCausalLM, tmp_path))


@pytest.fixture(scope="module")
def llama(tiny_folder: Path) -> Iterator[TargetModel]:
    yield TargetModel.load(
        tiny_folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=256,
        attn_implementation="sdpa",
    )


def test_the_self_check_finds_a_bottom_right_mask(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def bottom_right(positions: torch.Tensor, length: int) -> torch.Tensor:
        rows = torch.arange(len(positions))[:, None] + length - len(positions)
        return (torch.arange(length) <= rows)[None, None]

    self_check(llama)
    monkeypatch.setattr(model_module, "causal_rows", bottom_right)
    with pytest.raises(SelfCheckFailed, match="Recompute over a written chunk"):
        self_check(llama)


def test_the_self_check_finds_a_rotation_off_by_one(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    move = proofs.RopeTable.move
    monkeypatch.setattr(proofs.RopeTable, "move", lambda rope, keys, delta: move(rope, keys, delta - 1))
    with pytest.raises(SelfCheckFailed):
        self_check(llama)


def test_the_self_check_finds_positions_that_are_ignored(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = llama._model.base_model
    forward = decoder.forward

    def consecutive(*args: Any, position_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(*args, position_ids=torch.arange(position_ids.shape[1])[None], **rest)

    monkeypatch.setattr(decoder, "forward", consecutive)
    with pytest.raises(SelfCheckFailed, match="Recompute over a written chunk"):
        self_check(llama)
