"""`SpecCacheTransform`: the last step of an ingestion pipeline, which computes the KV of its nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.speccache.rendering import bare_texts
from llama_index.retrievers.speccache.nesting import NestedLLM


class SpecCacheTransform(TransformComponent):
    """Warms nodes and returns them unchanged. It belongs behind the splitter.

        IngestionPipeline(transformations=[SentenceSplitter(), SpecCacheTransform(llm=llm), embed_model])

    A pipeline with a cache skips this step for nodes it has seen, also where their KV is gone since: another model, an
    evicted chunk, a new store. `llm.warm(nodes)` computes what is missing and nothing else; call it in doubt. Run the
    pipeline without `num_workers`: every worker process would start an engine of its own.
    """

    llm: NestedLLM = Field(description="Whose engine computes and keeps the KV.")
    show_progress: bool = Field(default=False, description="Show a bar; a call's own argument wins.")

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes it."""
        return "SpecCacheTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes that have text.

        Raises:
            ChunkTooLong: a node does not fit in the model's context; nothing was computed.
            StoreError: the KV cannot be written.
        """
        texts = [text for text in bare_texts(nodes) if text.strip()]
        self.llm.warm(texts, show_progress=kwargs.get("show_progress", self.show_progress))
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same beside the event loop, which would stand still for minutes otherwise."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)
