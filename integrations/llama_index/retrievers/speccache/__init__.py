"""Steps of a LlamaIndex pipeline that tell the engine early which chunks a prompt will hold.

None of them is needed for reuse: `SpecCacheLLM` finds chunks in the prompt itself. They save the time of reading KV.
"""

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'SpecCacheRetriever needs llama-index-core. Install it with: pip install "speccache-rag[llama-index]"'
    ) from error

from llama_index.retrievers.speccache.base import SpecCacheRetriever
from llama_index.retrievers.speccache.postprocessor import SpecCachePostprocessor
from llama_index.retrievers.speccache.transform import SpecCacheTransform

__all__ = ["SpecCachePostprocessor", "SpecCacheRetriever", "SpecCacheTransform"]
