"""`SpecCacheRetriever`: any retriever, whose findings are prefetched."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.speccache import SpecCacheLLM


class SpecCacheRetriever(BaseRetriever):
    """Returns what the wrapped retriever returns; stored KV is read while the prompt is still being made.

        retriever = SpecCacheRetriever(index.as_retriever(), llm=llm)
        RetrieverQueryEngine.from_args(retriever, llm=llm).query("...")

    Where a postprocessor changes texts afterwards, use `SpecCachePostprocessor` instead.

    Args:
        retriever: the one that finds; its own events fire as before.
        llm: whose engine prefetches. `SpecCacheLLM(runtime=...)` wraps a live `SpecCache`.
        **kwargs: of `BaseRetriever`; the callback manager is the wrapped retriever's where none is given.
    """

    def __init__(self, retriever: BaseRetriever, llm: SpecCacheLLM, **kwargs: Any) -> None:
        self._retriever = retriever
        self._llm = llm
        super().__init__(**{"callback_manager": retriever.callback_manager, **kwargs})

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        self._llm.prefetch(nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        self._llm.prefetch(nodes)
        return nodes

    def _get_prompt_modules(self) -> PromptMixinType:
        """The wrapped retriever's prompts stay reachable, to be read and changed."""
        return {"retriever": self._retriever}
