"""`install`: what every retriever of the process finds is prefetched, and no pipeline is touched."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.llms.speccache.base import SpecCacheLLM
from llama_index.llms.speccache.events import dispatcher
from typing_extensions import Self


def install(llm: SpecCacheLLM) -> RetrieverHook:
    """Prefetch for `llm` what any LlamaIndex retriever of this process returns, while the prompt is still being made.

    Chunks that were warmed are reused without this; the hook gains the time of reading their KV, and makes texts known
    that nobody warmed: their second prompt reuses them.

        hook = install(llm)
        ...
        hook.remove()

    Returns:
        The hook, on. It is a context manager too: `with install(llm): ...` switches it off at the end.
    """
    hook = RetrieverHook(llm=llm)
    dispatcher.root.add_event_handler(hook)
    return hook


class RetrieverHook(BaseEventHandler):
    """Listens on LlamaIndex's root dispatcher, which hears of every retrieval, fused and asynchronous ones too."""

    llm: SpecCacheLLM

    @classmethod
    def class_name(cls) -> str:
        """Name among LlamaIndex's handlers."""
        return "SpecCacheRetrieverHook"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Prefetch the nodes of a finished retrieval; other events pass."""
        if isinstance(event, RetrievalEndEvent):
            self.llm.prefetch(event.nodes)

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        root = dispatcher.root
        # A new list: another thread may be walking the old one.
        root.event_handlers = [handler for handler in root.event_handlers if handler is not self]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
