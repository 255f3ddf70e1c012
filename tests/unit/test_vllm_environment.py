"""The environment of vLLM's processes."""

from __future__ import annotations

import os

import pytest

from speccache_rag.engines.vllm.frontend.environment import DEFAULTS, vllm_environment


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)


def test_it_is_there_for_a_time() -> None:
    with vllm_environment():
        assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS
    assert not DEFAULTS.keys() & os.environ.keys()


def test_what_the_user_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with vllm_environment():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
        assert os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == "60"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError), vllm_environment():
        raise RuntimeError
    assert not DEFAULTS.keys() & os.environ.keys()
