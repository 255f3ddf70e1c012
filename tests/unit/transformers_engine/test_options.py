from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.options import resolve_device
from speccache_rag.errors import (
    ConfigurationError,
)
from tests.tiny import tiny_model
from tests.unit.transformers_engine.serving import RAM


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_memory_utilization": 0.5}, "Unknown engine option 'gpu_memory_utilization'.*max_model_len"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_model_len": 3}, "max_model_len is 3"),
        ({"max_model_len": 99999}, "max_model_len is 99999; the model's own limit is 4096"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'"),
        ({"device": "toaster"}, "device is 'toaster'"),
        ({"device": "meta"}, "device is 'meta'"),
    ],
)
def test_a_bad_engine_option_is_named(tiny_folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        TransformersEngine(tiny_folder, options, RAM)


def test_the_best_device_is_the_default() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device(None).type == best


def test_facts_come_before_the_start(tiny_folder: Path) -> None:
    engine = TransformersEngine(tiny_folder, {"device": "cpu"}, RAM)
    assert (engine.facts.dtype, engine.facts.max_model_len) == ("float32", 4096)
    engine.close()


def test_yarn_may_reach_beyond_the_length_in_the_config(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "yarn", max_position_embeddings=1024)
    engine = TransformersEngine(folder, {"device": "cpu"}, RAM)
    assert engine.facts.max_model_len == 4096
    engine.close()
