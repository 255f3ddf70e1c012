from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speccache_rag.engines.base import ModelFacts
from speccache_rag.store.base import Namespace

PLAIN: dict[str, Any] = {"quantization": None, "dtype": "bfloat16", "rope": {"rope_theta": 1e4}, "max_model_len": 1024}


def key_of(model: Path, **facts: Any) -> str:
    found = ModelFacts.of(model, **{**PLAIN, **facts})
    return Namespace(found.fingerprint, found.dtype, found.rope, (1, 2)).key((5, 6))


@pytest.mark.parametrize(
    "fact",
    [
        {"quantization": "fp8"},
        {"dtype": "float16"},
        {"rope": {"rope_theta": 1e6}},
        {"changes": '{"rms_norm_eps": 0.5}'},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_each_fact_of_the_running_model_changes_the_key(tiny_folder: Path, fact: dict[str, Any]) -> None:
    assert key_of(tiny_folder, **fact) != key_of(tiny_folder)


@pytest.mark.parametrize("fact", [{"max_model_len": 2048}, {"load_format": "safetensors"}], ids=str)
def test_what_leaves_kv_alone_does_not(tiny_folder: Path, fact: dict[str, Any]) -> None:
    assert key_of(tiny_folder, **fact) == key_of(tiny_folder)
