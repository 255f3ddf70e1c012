"""One line for pipelines that wrap nothing: every retriever's documents are announced to a model."""

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


class _Announcer(BaseCallbackHandler):
    """Tells the installed models what retrievers return."""

    run_inline = True  # before the prompt is made, also under asyncio

    def __init__(self) -> None:
        self.hooks: tuple[RetrieverHook, ...] = ()

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        for hook in self.hooks:
            hook.llm.prefetch(documents)


_lock = threading.Lock()
_announcer: _Announcer | None = None


class RetrieverHook:
    """An installed hook; `remove` it, or use it as a context manager."""

    def __init__(self, llm: SpecCacheModel) -> None:
        self.llm = llm

    def remove(self) -> None:
        """Announce no more documents to this model. Idempotent."""
        with _lock:
            if _announcer is not None:
                _announcer.hooks = tuple(hook for hook in _announcer.hooks if hook is not self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def install(llm: SpecCacheModel) -> RetrieverHook:
    """Announce what every LangChain retriever of this process returns to `llm`, as `SpecCacheRetriever` does for one.

    Holds in every thread, task and context, also those begun before.

        hook = install(llm)
        ...
        hook.remove()
    """
    global _announcer
    hook = RetrieverHook(llm)
    with _lock:
        if _announcer is None:
            # LangChain cannot unregister, so one handler stays for good, idle while no hook is installed. A context
            # variable's default is seen in every context.
            _announcer = _Announcer()
            variable: ContextVar[Any] = ContextVar("speccache", default=_announcer)
            register_configure_hook(variable, inheritable=True)
        _announcer.hooks += (hook,)
    return hook
