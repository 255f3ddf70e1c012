from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    SmolLM3Config,
    T5Config,
)

from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.support import check_config
from speccache_rag.errors import (
    UnsupportedModel,
)
from tests.tiny import tiny_model
from tests.unit.transformers_engine.serving import OPTIONS, RAM

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=512), "sliding-window attention .window 512"),
        (Gemma2Config(), "sliding_attention"),
        (DeepseekV3Config(), "MLA"),
        (LlamaConfig(rope_parameters=DYNAMIC), "'dynamic'"),
        (Phi3Config(rope_parameters=LONGROPE), "'longrope'"),
        (GPT2Config(), "not rotary"),
        (GPT2Config(add_cross_attention=True), "cross-attention"),
        (BloomConfig(), "not rotary"),
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "linear_attention"),
        (SmolLM3Config(), "no RoPE"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else value,
)
def test_unsupported_configs_are_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config("it", config)


def test_a_refusal_comes_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "mistral", sliding_window=64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        TransformersEngine(folder, dict(OPTIONS), RAM)
