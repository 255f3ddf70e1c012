"""Our methods on vLLM's worker (`worker_extension_cls`), called by `collective_rpc`.

They take and give plain values, because vLLM serialises nothing else safely between its processes. Errors travel as
values too: raised ones would arrive as text.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from speccache_rag.engines.vllm.connector import SpecCacheConnector
from speccache_rag.engines.vllm.worker.half import WorkerHalf
from speccache_rag.engines.vllm.worker.selfcheck import self_check
from speccache_rag.errors import EngineStartError, SpecCacheError
from speccache_rag.types import ChunkKey

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class SpecCacheExtension:
    """Mixed into the worker."""

    model_runner: GPUModelRunner

    def speccache_attach(self) -> dict[str, str] | None:
        """Give the loaded model to the connector; an error or None."""
        try:
            self._speccache().attach(self.model_runner)
        except SpecCacheError as error:
            return error.to_dict()
        return None

    @torch.inference_mode()
    def speccache_self_check(self, token_ids: list[int]) -> dict[str, str] | None:
        """Prove, on the real cache tensors, that reuse equals prefill for the captured probe; an error or None."""
        try:
            self_check(self._speccache(), token_ids, self.model_runner.model_config.max_model_len)
        except SpecCacheError as error:
            return error.to_dict()
        return None

    def speccache_take_outcome(self, tag: str) -> dict[str, Any] | None:
        """Fields of the request's `ReuseOutcome`, given once; None if nothing was reused."""
        outcome = self._speccache().take_outcome(tag)
        return asdict(outcome) if outcome else None

    def speccache_take_answer(self, tag: str) -> bytes | None:
        """float32 [T] as bytes, the answer to an inquiry, given once."""
        found = self._speccache().take_answer(tag)
        return None if found is None else found.astype("<f4").tobytes()

    def speccache_take_capture(self, tag: str) -> int | dict[str, str] | None:
        """Stored bytes of a capture, or its error, given once; None if it did not complete."""
        result = self._speccache().take_capture(tag)
        return result.to_dict() if isinstance(result, SpecCacheError) else result

    def speccache_present(self, keys: list[str]) -> list[bool]:
        """Which chunks are in the worker's store."""
        store = self._speccache().store
        return [store.contains(ChunkKey(key)) for key in keys]

    def speccache_prefetch(self, keys: list[str]) -> None:
        """Begin to read stored chunks into memory."""
        self._speccache().store.prefetch([ChunkKey(key) for key in keys])

    def _speccache(self) -> WorkerHalf:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, SpecCacheConnector):
            raise EngineStartError(
                f"vLLM runs with the KV connector {type(connector).__name__}, not with ours.",
                hint="Another plugin replaced it; remove that plugin or set VLLM_PLUGINS.",
            )
        return connector.worker
