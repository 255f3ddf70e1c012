"""What a watch sees is what the model itself says it attends to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speccache_rag.engines.transformers.watching import watching
from tests.kinds import EQUAL, KINDS
from tests.tiny import tiny_model

IDS = torch.arange(5, 45)[None]


@pytest.mark.parametrize("usual", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.transformers == EQUAL])
def test_it_sees_the_models_own_attention(kind: str, usual: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=usual, dtype=torch.float32).eval()
    before = list(ALL_ATTENTION_FUNCTIONS)
    with torch.no_grad():
        expected = model(IDS).logits
        with watching(model, [1, 3], n_rows=4, first_position=36) as watch:
            logits = model(IDS).logits
        model.set_attn_implementation("eager")
        attentions = model(IDS, output_attentions=True).attentions
    assert watch.most is not None
    of_rows = torch.stack([attentions[index][0, :, -4:].amax(dim=0) for index in (1, 3)]).amax(dim=0)
    np.testing.assert_allclose(watch.most.numpy(), of_rows.numpy(), atol=1e-5)
    np.testing.assert_allclose(logits.numpy(), expected.numpy(), atol=1e-3)
    assert list(ALL_ATTENTION_FUNCTIONS) == before


def test_the_model_attends_as_before_after_a_failure(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path), attn_implementation="sdpa")
    before = list(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(RuntimeError, match="stopped"), watching(model, [0], n_rows=1, first_position=0):
        raise RuntimeError("stopped")
    assert model.config._attn_implementation == "sdpa"
    assert list(ALL_ATTENTION_FUNCTIONS) == before
