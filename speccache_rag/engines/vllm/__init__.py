"""The vLLM engine: chunk KV reuse with selective recompute on stock vLLM, through its own extension points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccache_rag.engines.base import Engine
from speccache_rag.engines.readers import AnswerReader, ReaderRequest
from speccache_rag.engines.vllm.frontend.environment import vllm_environment
from speccache_rag.engines.vllm.frontend.versions import check_version


def vllm_engine(model: Path, options: dict[str, Any], store: dict[str, Any]) -> Engine:
    """A `VllmEngine`. The version is checked first: another vLLM may not even have what the engine imports.

    Raises:
        UnsupportedVersion: vLLM is missing or outside the supported window.
        UnsupportedModel, ConfigurationError, EngineStartError: see their messages.
    """
    check_version()
    with vllm_environment():
        from speccache_rag.engines.vllm.frontend.engine import VllmEngine

        return VllmEngine(model, options, store)


def vllm_reader(request: ReaderRequest) -> AnswerReader:
    """A reader over vLLM's own reasoning and tool parsers. They need vLLM installed, and none of its engines running.

    Raises:
        UnsupportedVersion: vLLM is missing or outside the supported window.
        ConfigurationError: see `VllmReader`.
    """
    check_version()
    with vllm_environment():
        from speccache_rag.engines.vllm.frontend.reader import VllmReader

    return VllmReader(request)
