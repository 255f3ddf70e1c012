from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.sampling_params import RequestOutputKind

from speccache_rag.engines.vllm.connector import SpecCacheConnector
from speccache_rag.engines.vllm.frontend import options
from speccache_rag.engines.vllm.frontend.options import CPU_KV_CACHE_BYTES, engine_args, sampling_params
from speccache_rag.engines.vllm.worker.extension import SpecCacheExtension
from speccache_rag.errors import ConfigurationError

STORE = {"path": "chunks", "ram_bytes": 5}


# vLLM looks a name that is no folder up in the hub's cache.
FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(options, "current_platform", SimpleNamespace(is_cpu=lambda: True))


def args_of(**given: Any) -> Any:
    return engine_args(FOLDER, given, STORE)


# Engine options.


def test_our_parts_are_in_the_arguments() -> None:
    args = args_of(max_model_len=128)
    assert (args.model, args.max_model_len) == (str(FOLDER), 128)
    transfer = args.kv_transfer_config
    assert transfer.kv_connector == SpecCacheConnector.__name__
    assert transfer.kv_connector_module_path == SpecCacheConnector.__module__
    assert transfer.kv_role == "kv_both"
    assert transfer.kv_load_failure_policy == "recompute"  # a fill that fails costs its request no more than time
    assert transfer.kv_connector_extra_config == {"store": STORE, "min_fill_tokens": 128}
    assert args.worker_extension_cls == f"{SpecCacheExtension.__module__}.{SpecCacheExtension.__name__}"


def test_the_floor_of_fills_is_an_engine_option() -> None:
    assert args_of(min_fill_tokens=7).kv_transfer_config.kv_connector_extra_config["min_fill_tokens"] == 7
    with pytest.raises(ConfigurationError, match="'min_fill_tokens' is 0"):
        args_of(min_fill_tokens=0)


def test_vllm_logs_no_stats_unless_asked_to() -> None:
    assert args_of().disable_log_stats is True
    assert args_of(disable_log_stats=False).disable_log_stats is False


def test_random_weights_are_refused_beside_a_store_on_disk() -> None:
    with pytest.raises(ConfigurationError, match=r"'dummy'.*'chunks'"):
        args_of(load_format="dummy")
    assert engine_args(FOLDER, {"load_format": "dummy"}, {"path": None}).load_format == "dummy"


def test_unknown_engine_options_are_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        args_of(max_modle_len=128, gpu_memory=0.5, max_model_len=128)
    assert "'gpu_memory', 'max_modle_len'" in str(caught.value)
    assert "AsyncEngineArgs" in str(caught.value)


@pytest.mark.parametrize("name", ["model", "kv_transfer_config", "worker_extension_cls"])
def test_options_that_are_ours_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' is set by SpecCache itself"):
        args_of(**{name: "mine"})


def test_the_cpu_gets_a_modest_kv_cache() -> None:
    assert args_of().kv_cache_memory_bytes == CPU_KV_CACHE_BYTES == 2 << 30


def test_the_kv_cache_default_has_three_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert args_of(kv_cache_memory_bytes=1 << 20).kv_cache_memory_bytes == 1 << 20
    by_share = args_of(gpu_memory_utilization=0.3)
    assert (by_share.kv_cache_memory_bytes, by_share.gpu_memory_utilization) == (None, 0.3)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert args_of().kv_cache_memory_bytes is None


def test_other_platforms_keep_vllms_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert args_of().kv_cache_memory_bytes is None


# Sampling options.


def test_sampling_options_reach_vllm() -> None:
    params = sampling_params(
        {"max_tokens": 7, "temperature": 0.0, "stop": ["\n"], "seed": 3}, {"speccache": {"tag": "t"}}
    )
    assert (params.max_tokens, params.temperature, params.stop, params.seed) == (7, 0.0, ["\n"], 3)
    assert params.output_kind == RequestOutputKind.DELTA
    assert params.extra_args == {"kv_transfer_params": {"speccache": {"tag": "t"}}}


def test_a_plain_request_carries_nothing_of_ours() -> None:
    assert sampling_params({}, None).extra_args is None


def test_none_counts_as_not_given() -> None:
    given = {"max_tokens": None, "temperature": None, "seed": None, "top_p": None, "no_such_option": None}
    assert sampling_params(given, None) == sampling_params({}, None)


def test_unknown_sampling_options_are_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        sampling_params({"max_new_tokens": 3, "temprature": 0.0, "top_p": 0.9}, None)
    assert "'max_new_tokens', 'temprature'" in str(caught.value)
    assert "max_tokens" in caught.value.hint


@pytest.mark.parametrize("name", ["n", "output_kind", "extra_args", "skip_reading_prefix_cache", "prompt_logprobs"])
def test_sampling_options_that_reuse_cannot_serve_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        sampling_params({name: 1}, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("top_p", 1.5),
        ("top_k", -7),
        ("min_p", 2.0),
        ("presence_penalty", 9),
        ("stop", [""]),
        ("logprobs", -3),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        sampling_params({name: value}, None)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
