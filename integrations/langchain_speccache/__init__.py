"""LangChain models whose retrieved chunks are served from reused KV."""

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'langchain_speccache needs langchain-core. Install it with: pip install "speccache-rag[langchain]"'
    ) from error

from langchain_speccache.anchor import anchor_for
from langchain_speccache.chat_models import ChatSpecCache
from langchain_speccache.hook import RetrieverHook, install
from langchain_speccache.llms import SpecCacheCompletion
from langchain_speccache.retrievers import SpecCacheRetriever

__all__ = ["ChatSpecCache", "RetrieverHook", "SpecCacheCompletion", "SpecCacheRetriever", "anchor_for", "install"]
