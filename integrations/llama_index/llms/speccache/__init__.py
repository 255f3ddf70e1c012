"""LlamaIndex LLM whose retrieved chunks are served from reused KV."""

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'SpecCacheLLM needs llama-index-core. Install it with: pip install "speccache-rag[llama-index]"'
    ) from error

from llama_index.llms.speccache.base import SpecCacheLLM
from llama_index.llms.speccache.events import SpecCacheReuseEvent
from llama_index.llms.speccache.hook import RetrieverHook, install
from llama_index.llms.speccache.rendering import anchor_for

__all__ = ["RetrieverHook", "SpecCacheLLM", "SpecCacheReuseEvent", "anchor_for", "install"]
