"""`SpecCacheRetriever`: any retriever, whose documents are prefetched before the prompt is made."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from pydantic import Field

from langchain_speccache.base import SpecCacheModel


class SpecCacheRetriever(BaseRetriever):
    """A retriever around another one. Reuse does not depend on it; with it, reuse starts sooner.

        retriever = SpecCacheRetriever(retriever=store.as_retriever(), llm=llm)

    Stored KV of retrieved documents is read into memory while the prompt is still being made, and documents that were
    never warmed become known: the first prompt that holds one computes it, later ones reuse it. The inner retriever
    runs as a child, so its own callbacks and traces stay.
    """

    retriever: Runnable[str, list[Document]] = Field(description="The one that finds documents.")
    llm: SpecCacheModel = Field(description="The model that will read them.")
    k: int | None = Field(default=None, gt=0, description="Most documents given; None gives all that were found.")

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)[: k or self.k]
        self.llm.prefetch(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = (await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs))[: k or self.k]
        self.llm.prefetch(found)
        return found
