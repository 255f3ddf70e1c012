"""One line for pipelines that wrap nothing: every retriever's documents are prefetched."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook
from typing_extensions import Self

from langchain_speccache.base import SpecCacheModel


class _Prefetcher(BaseCallbackHandler):
    """Has the installed models prefetch what retrievers return."""

    run_inline = True  # before the prompt is made, also under asyncio

    def __init__(self) -> None:
        self.hooks: tuple[RetrieverHook, ...] = ()

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        for hook in self.hooks:
            hook.llm.prefetch(documents)


_lock = threading.Lock()
_prefetcher: _Prefetcher | None = None


class RetrieverHook:
    """An installed hook; `remove` it, or use it as a context manager."""

    def __init__(self, llm: SpecCacheModel) -> None:
        self.llm = llm

    def remove(self) -> None:
        """Prefetch no more documents for this model. Idempotent."""
        with _lock:
            if _prefetcher is not None:
                _prefetcher.hooks = tuple(hook for hook in _prefetcher.hooks if hook is not self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install(llm: SpecCacheModel) -> RetrieverHook:
    """Prefetch for `llm` what any LangChain retriever of this process returns, as `SpecCacheRetriever` does for one.

    Holds in every thread, task and context, also those begun before.

        hook = install(llm)
        ...
        hook.remove()
    """
    global _prefetcher
    hook = RetrieverHook(llm)
    with _lock:
        if _prefetcher is None:
            # LangChain cannot unregister, so one handler stays for good, idle while no hook is installed. A context
            # variable's default is seen in every context.
            _prefetcher = _Prefetcher()
            variable: ContextVar[Any] = ContextVar("speccache", default=_prefetcher)
            register_configure_hook(variable, inheritable=True)
        _prefetcher.hooks += (hook,)
    return hook
