from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError
from speccache_rag.selection.factory import build_policy


def test_defaults() -> None:
    config = SpecCacheConfig.build(model="org/target")
    assert (config.engine, config.policy, config.scoring, config.recompute_ratio) == (
        "vllm",
        "epic",
        "cached",
        0.15,
    )
    assert config.store is None
    assert config.speculative_model is None


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown option 'recompute' \(known: model, .*recompute_ratio"):
        SpecCacheConfig.build(model="m", recompute=0.2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("recompute_ratio", -0.01),
        ("recompute_ratio", 1.01),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", "much"),
        ("ram_bytes", 0),
        ("scoring", "offline"),
        ("model", ""),
        ("model", "  "),
        ("policy_options", [1]),
    ],
)
def test_a_bad_value_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        SpecCacheConfig.build(**{"model": "m", option: value})
    assert f"option {option!r} is {value!r}" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValidationError)


def test_all_bad_options_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        SpecCacheConfig.build(recompute_ratio=2, polcy="speccache")
    for clause in ("option 'model' is missing", "option 'recompute_ratio' is 2", "unknown option 'polcy'"):
        assert clause in str(raised.value)


@pytest.mark.parametrize("ratio", [0, 1, 0.0, 1.0])
def test_the_ends_of_the_ratio_are_allowed(ratio: float) -> None:
    assert SpecCacheConfig.build(model="m", recompute_ratio=ratio).recompute_ratio == ratio


def test_paths_may_be_given_as_paths() -> None:
    config = SpecCacheConfig.build(model=Path("~/models/target"), store=Path("kv"))
    assert config.model == str(Path("~/models/target").expanduser())
    assert config.store == "kv"


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SpecCacheConfig.build(model="m").policy = "random"  # type: ignore[misc]


def test_round_trip_through_json() -> None:
    config = SpecCacheConfig.build(model="m", policy_options={"tau_cover": 0.5}, store="kv", tenant="a")
    assert SpecCacheConfig.model_validate_json(config.model_dump_json()) == config


def test_a_configuration_survives_its_toml_file(tmp_path: Path) -> None:
    config = SpecCacheConfig(
        model='models/a "b"',
        policy="heads(4)+attended(target)",
        recompute_ratio=0.05,
        tenant="Zo\u00eb",
        engine_options={"max_model_len": 512, "enforce_eager": True, "dtype": "float32"},
    )
    file = tmp_path / "speccache.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert SpecCacheConfig.load(file) == config
    assert "ram_bytes" not in file.read_text(encoding="utf-8")
    assert SpecCacheConfig.from_one_source({}, str(file), None, hint="") == config


def test_a_configuration_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml' cannot be read"):
        SpecCacheConfig.load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(ConfigurationError, match=r"bad\.toml' cannot be read"):
        SpecCacheConfig.load(tmp_path / "bad.toml")
    (tmp_path / "odd.toml").write_text('model = "m"\nratio = 3\n')
    with pytest.raises(ConfigurationError, match="unknown option 'ratio'"):
        SpecCacheConfig.load(tmp_path / "odd.toml")


def test_the_default_policy_needs_no_speculative_model() -> None:
    config = SpecCacheConfig(model="m")
    assert not build_policy(config.policy, config.policy_options).needs_speculative_model
