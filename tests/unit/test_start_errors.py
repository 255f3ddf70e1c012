from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from speccache_rag.engines.vllm.frontend.start_errors import VARIABLE, check_process, explained, record
from speccache_rag.errors import EngineStartError

KV_CACHE = (
    "To serve at least one request with the model's max seq len (4096), (2.0 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum model length "
    "is 2048. Try increasing `gpu_memory_utilization`."
)


@pytest.fixture
def vllm_logger() -> Iterator[logging.Logger]:
    """vLLM's logger, without the handlers that a test adds."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    yield logger
    logger.handlers = before


def start(logger: logging.Logger, *causes: Exception, told: Exception) -> str:
    """The message of a start in which vLLM logged these causes and told its caller that."""
    with pytest.raises(EngineStartError) as caught, explained():
        record()
        for cause in causes:
            logger.error("did not start", exc_info=cause)
        raise told
    assert caught.value.__cause__ is told
    return str(caught.value)


TOLD = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}")


def test_the_first_cause_is_told_with_its_remedy(vllm_logger: logging.Logger) -> None:
    message = start(vllm_logger, ValueError(KV_CACHE), RuntimeError("a worker failed"), told=TOLD)
    assert message.startswith("vLLM did not start: ValueError: To serve at least one request")
    assert "2.0 GiB KV cache is needed" in message
    assert "is 2048. Lower max_model_len in engine_options" in message
    assert "Try increasing" not in message


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError("[Errno 12] Cannot allocate memory"),
        ValueError(
            "Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired GPU memory utilization"
        ),
    ],
    ids=str,
)
def test_memory_is_named_as_the_remedy(vllm_logger: logging.Logger, cause: Exception) -> None:
    assert "Free memory, or lower" in start(vllm_logger, cause, told=TOLD)


def test_a_killed_process_is_told_as_one() -> None:
    message = "A process was killed, as the system does where memory runs out"
    with pytest.raises(EngineStartError, match=message), explained():
        raise RuntimeError("Failed core proc(s): {'EngineCore_DP0': -9}")


def test_without_a_logged_cause_vllms_own_words_are_kept() -> None:
    message = r"did not start: no such device vLLM printed the cause above\."
    with pytest.raises(EngineStartError, match=message), explained():
        raise ValueError("no such device")


def test_nothing_is_noted_once_the_engine_has_started(vllm_logger: logging.Logger) -> None:
    with explained():
        record()
    vllm_logger.error("much later", exc_info=ValueError("a request"))  # no file, no complaint
    assert VARIABLE not in os.environ
    record()
    assert len([handler for handler in vllm_logger.handlers if "Recorder" in type(handler).__name__]) == 1


def test_a_daemon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(EngineStartError, match=r"daemon process, as those of multiprocessing\.Pool.*spawn"):
        check_process()


def test_a_main_script_that_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="<stdin>"))
    with pytest.raises(EngineStartError, match="no file '<stdin>'.*Save a program"):
        check_process()


def test_notebooks_and_python_c_have_no_main_script_and_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    check_process()
