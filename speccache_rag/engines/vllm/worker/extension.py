"""Our methods on vLLM's worker (`worker_extension_cls`), called by `collective_rpc`.

They take and give plain values, because vLLM serialises nothing else safely between its processes. Errors travel as
values too: raised ones would arrive as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from speccache_rag.engines.vllm.connector import SpecCacheConnector
from speccache_rag.engines.vllm.worker.half import WorkerHalf
from speccache_rag.engines.vllm.worker.selfcheck import self_check
from speccache_rag.errors import EngineStartError, SpecCacheError
from speccache_rag.types import ChunkKey

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


Failure = dict[str, dict[str, str]]
"""{"error": ...}, an error of this package as plain values."""


class SpecCacheExtension:
    """Mixed into the worker."""

    model_runner: GPUModelRunner

    def speccache_attach(self) -> Failure | None:
        """Give the loaded model to the connector; an error or None."""
        try:
            self._speccache().attach(self.model_runner)
        except SpecCacheError as error:
            return {"error": error.to_dict()}
        return None

    @torch.inference_mode()
    def speccache_self_check(self, token_ids: list[int]) -> Failure | None:
        """Prove, on the real cache tensors, that reuse equals prefill for the captured probe; an error or None."""
        try:
            self_check(self._speccache(), token_ids, self.model_runner.model_config.max_model_len)
        except SpecCacheError as error:
            return {"error": error.to_dict()}
        return None

    def speccache_take_captures(self, tags: list[str]) -> dict[str, int | dict[str, str]]:
        """Of these captures those that ended, given once: stored bytes, or an error."""
        ended = self._speccache().captures.take(tags)
        return {tag: r.to_dict() if isinstance(r, SpecCacheError) else r for tag, r in ended.items()}

    def speccache_forget(self, keys: list[str]) -> dict[str, str] | None:
        """Remove chunks from the worker's store; an error or None."""
        try:
            self._speccache().store.delete_many([ChunkKey(key) for key in keys])
        except SpecCacheError as error:
            return error.to_dict()
        return None

    def speccache_present(self, keys: list[str]) -> list[bool]:
        """Whose KV is in the store, one for each key."""
        store = self._speccache().store
        return [store.contains(ChunkKey(key)) for key in keys]

    def speccache_prefetch(self, keys: list[str]) -> None:
        """Begin to read stored chunks into memory."""
        self._speccache().store.request([ChunkKey(key) for key in keys])

    def _speccache(self) -> WorkerHalf:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, SpecCacheConnector):
            raise EngineStartError(
                f"vLLM runs with the KV connector {type(connector).__name__}, not with ours.",
                hint="Another plugin replaced it; remove that plugin or set VLLM_PLUGINS.",
            )
        return connector.worker
