"""`SpecCachePostprocessor`: prefetches the texts that are left when all other postprocessors are done."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.llms.speccache import SpecCacheLLM
from llama_index.retrievers.speccache.nesting import NestedLLM


class SpecCachePostprocessor(BaseNodePostprocessor):
    """Changes nothing; put it last, behind rerankers and whatever replaces texts.

        windows = MetadataReplacementPostProcessor("window")
        index.as_query_engine(llm=llm, node_postprocessors=[windows, SpecCachePostprocessor(llm=llm)])

    Stored KV of the texts that reach the prompt is read while the prompt is still being made.
    """

    llm: NestedLLM = Field(description="Whose engine prefetches.")

    def __init__(self, llm: SpecCacheLLM, **kwargs: object) -> None:
        super().__init__(llm=llm, **kwargs)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes it."""
        return "SpecCachePostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.llm.prefetch(nodes)
        return nodes
