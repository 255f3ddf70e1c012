"""`SpecCacheRetriever` and the global hook: the model hears of documents before the prompt is made."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.tracers.context import _configure_hooks
from pydantic import ValidationError

import langchain_speccache
from langchain_speccache import ChatSpecCache, RetrieverHook, SpecCacheRetriever, install
from tests.unit.fake_runtime import FakeRuntime

TEXTS = ["  a chunk\n", "another", "a third"]


class Shelf(BaseRetriever):
    """Always the same documents; `asked` holds how."""

    asked: list[Any] = []

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, lang: str = "en"
    ) -> list[Document]:
        self.asked.append((query, lang))
        return [Document(text, metadata={"lang": lang}) for text in TEXTS]


class Retrievals(BaseCallbackHandler):
    """Which retrieval ran inside which."""

    def __init__(self) -> None:
        self.parents: list[tuple[Any, Any]] = []

    def on_retriever_start(self, *_: Any, run_id: Any, parent_run_id: Any = None, **__: Any) -> None:
        self.parents.append((run_id, parent_run_id))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def retriever(runtime: FakeRuntime) -> SpecCacheRetriever:
    return SpecCacheRetriever(retriever=Shelf(asked=[]), llm=ChatSpecCache(runtime=runtime))


def test_documents_pass_unchanged_and_are_prefetched(retriever: SpecCacheRetriever, runtime: FakeRuntime) -> None:
    assert retriever.invoke("why?") == Shelf(asked=[]).invoke("why?")
    assert runtime.prefetched == TEXTS


async def test_the_same_in_a_running_loop(
    retriever: SpecCacheRetriever, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shelf, "invoke", lambda *_, **__: pytest.fail("the inner retriever was called synchronously"))
    where: list[int] = []
    monkeypatch.setattr(runtime, "prefetch", lambda texts: where.append(threading.get_ident()))
    assert [document.page_content for document in await retriever.ainvoke("why?")] == TEXTS
    assert where == [threading.get_ident()]  # it waits for nothing, so no thread is worth its while


def test_k_limits_what_is_given_and_prefetched(retriever: SpecCacheRetriever, runtime: FakeRuntime) -> None:
    assert len(retriever.invoke("why?", k=1)) == 1
    assert runtime.prefetched == TEXTS[:1]
    two = SpecCacheRetriever(retriever=retriever.retriever, llm=retriever.llm, k=2)
    assert [len(two.invoke("why?")), len(asyncio.run(two.ainvoke("why?"))), len(two.invoke("why?", k=3))] == [2, 2, 3]


def test_other_arguments_reach_the_inner_retriever(retriever: SpecCacheRetriever) -> None:
    assert retriever.invoke("why?", lang="de")[0].metadata == {"lang": "de"}
    assert retriever.retriever.asked == [("why?", "de")]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_inner_retriever_runs_as_a_child(retriever: SpecCacheRetriever, is_async: bool) -> None:
    seen = Retrievals()
    config: Any = {"callbacks": [seen]}
    _ = asyncio.run(retriever.ainvoke("why?", config)) if is_async else retriever.invoke("why?", config)
    [(outer, none), (_, parent)] = seen.parents
    assert (none, parent) == (None, outer)


def test_only_our_models_are_taken() -> None:
    with pytest.raises(ValidationError, match="instance of SpecCacheModel"):
        SpecCacheRetriever(retriever=Shelf(asked=[]), llm="tiny")


# The global hook.


@pytest.fixture
def hook(runtime: FakeRuntime) -> Iterator[RetrieverHook]:
    with install(ChatSpecCache(runtime=runtime)) as installed:
        yield installed


@pytest.mark.parametrize("is_async", [False, True])
def test_what_any_retriever_returns_is_prefetched(hook: RetrieverHook, runtime: FakeRuntime, is_async: bool) -> None:
    _ = asyncio.run(Shelf(asked=[]).ainvoke("why?")) if is_async else Shelf(asked=[]).invoke("why?")
    assert runtime.prefetched == TEXTS


def test_it_holds_in_other_threads_and_empty_contexts(hook: RetrieverHook, runtime: FakeRuntime) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Shelf(asked=[]).invoke, "why?").result()
    contextvars.Context().run(Shelf(asked=[]).invoke, "why?")
    assert runtime.prefetched == TEXTS * 2


def test_a_removed_hook_hears_nothing(hook: RetrieverHook, runtime: FakeRuntime) -> None:
    other = FakeRuntime()
    with install(ChatSpecCache(runtime=other)):
        hook.remove()
        hook.remove()
        Shelf(asked=[]).invoke("why?")
    Shelf(asked=[]).invoke("why?")
    assert (runtime.prefetched, other.prefetched) == ([], TEXTS)


def test_many_installations_leave_one_handler(runtime: FakeRuntime) -> None:
    install(ChatSpecCache(runtime=runtime)).remove()
    before = len(_configure_hooks)
    for _ in range(3):
        install(ChatSpecCache(runtime=runtime)).remove()
    assert len(_configure_hooks) == before


def test_retrieval_survives_a_model_that_fails(hook: RetrieverHook, runtime: FakeRuntime) -> None:
    runtime.prefetch = None
    assert len(Shelf(asked=[]).invoke("why?")) == len(TEXTS)


# The package.


def test_public_names_are_pinned() -> None:
    assert sorted(langchain_speccache.__all__) == [
        "ChatSpecCache",
        "RetrieverHook",
        "SpecCacheCompletion",
        "SpecCacheRetriever",
        "anchor_for",
        "install",
    ]
    assert [name for name in langchain_speccache.__all__ if not getattr(langchain_speccache, name).__doc__] == []


def test_importing_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "langchain_speccache"]:
        monkeypatch.delitem(sys.modules, name)
    before = len(_configure_hooks)
    fresh = importlib.import_module("langchain_speccache")
    assert fresh is not langchain_speccache
    assert len(_configure_hooks) == before
    fresh.install(ChatSpecCache(runtime=FakeRuntime())).remove()
    assert len(_configure_hooks) == before + 1  # what is counted is what installing changes


def test_a_missing_langchain_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "langchain_speccache")
    monkeypatch.setitem(sys.modules, "langchain_core", None)
    with pytest.raises(ImportError, match=r'pip install "speccache-rag\[langchain\]"'):
        importlib.import_module("langchain_speccache")
