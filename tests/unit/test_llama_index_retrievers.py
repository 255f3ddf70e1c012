"""The steps that prefetch and warm chunks, against a scripted runtime."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import Document, IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.llms import speccache as llms
from llama_index.llms.speccache import SpecCacheLLM
from llama_index.retrievers import speccache as retrievers
from llama_index.retrievers.speccache import SpecCachePostprocessor, SpecCacheRetriever, SpecCacheTransform

from tests.unit.fake_runtime import FakeRuntime


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def llm(runtime: FakeRuntime) -> SpecCacheLLM:
    return SpecCacheLLM(runtime=runtime)


def found(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, metadata={"file": "a.md"}), score=1.0) for text in texts]


class Found(BaseRetriever):
    """Two implementations, to see which is called."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return found("one\n", "two")

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return found("one, asynchronously")


class Retrievals(BaseEventHandler):
    seen: list[Any] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            self.seen.append(event)


# The public names.


def test_public_names_are_pinned() -> None:
    assert llms.__all__ == ["RetrieverHook", "SpecCacheLLM", "SpecCacheReuseEvent", "anchor_for", "install"]
    assert retrievers.__all__ == ["SpecCachePostprocessor", "SpecCacheRetriever", "SpecCacheTransform"]
    for module in (llms, retrievers):
        assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []
        assert (Path(str(module.__file__)).parent / "py.typed").exists()


def test_a_missing_llama_index_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_index.retrievers.speccache")
    monkeypatch.setitem(sys.modules, "llama_index.core", None)
    with pytest.raises(ImportError, match=r'pip install "speccache-rag\[llama-index\]"'):
        importlib.import_module("llama_index.retrievers.speccache")


# The retriever.


def test_the_retriever_returns_and_prefetches_what_was_found(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    nodes = SpecCacheRetriever(Found(), llm=llm).retrieve("Why?")
    assert [node.text for node in nodes] == ["one\n", "two"]
    assert runtime.prefetched == ["one\n", "two"]


async def test_the_async_retriever_is_the_wrapped_ones_own(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    where: list[int] = []
    runtime.prefetch = lambda texts: where.append(threading.get_ident())  # type: ignore[method-assign]
    nodes = await SpecCacheRetriever(Found(), llm=llm).aretrieve("Why?")
    assert [node.text for node in nodes] == ["one, asynchronously"]
    assert where == [threading.get_ident()]  # it waits for nothing, so no thread is worth its while


def test_the_wrapped_retrievers_events_fire(llm: SpecCacheLLM) -> None:
    handler = Retrievals(seen=[])
    get_dispatcher().event_handlers.append(handler)
    try:
        SpecCacheRetriever(Found(), llm=llm).retrieve("Why?")
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert len(handler.seen) == 2  # its own and the wrapper's


def test_the_retriever_keeps_callbacks_and_prompts(llm: SpecCacheLLM) -> None:
    inner = Found(callback_manager=CallbackManager([]))
    wrapper = SpecCacheRetriever(inner, llm=llm)
    assert wrapper.callback_manager is inner.callback_manager
    assert wrapper._get_prompt_modules() == {"retriever": inner}
    other = CallbackManager([])
    assert SpecCacheRetriever(inner, llm=llm, callback_manager=other).callback_manager is other


def test_index_nodes_are_resolved_before_they_are_prefetched(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    class Referring(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=IndexNode(text="a summary", index_id="x", obj=Found()), score=1.0)]

    SpecCacheRetriever(Referring(), llm=llm).retrieve("Why?")
    assert runtime.prefetched == ["one\n", "two"]


# The postprocessor.


def test_the_postprocessor_prefetches_final_texts(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    class Windows(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(text="short", metadata={"window": "long, short, long"}), score=1.0)]

    steps = [MetadataReplacementPostProcessor("window"), SpecCachePostprocessor(llm=llm)]
    RetrieverQueryEngine.from_args(Windows(), llm=llm, node_postprocessors=steps).query("Why?")
    assert runtime.prefetched == ["long, short, long"]


async def test_the_postprocessor_changes_nothing(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    nodes = found("one", "two")
    step = SpecCachePostprocessor(llm=llm)
    assert step.postprocess_nodes(nodes) is nodes
    assert await step.apostprocess_nodes(nodes, query_str="Why?") is nodes
    assert runtime.prefetched == ["one", "two"] * 2


# The transform.


def test_the_transform_warms_nodes_and_returns_them(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    nodes = [TextNode(text="one", metadata={"file": "a.md"}), TextNode(text=" \n"), TextNode(text="two")]
    before = [node.model_dump() for node in nodes]
    assert SpecCacheTransform(llm=llm)(nodes) is nodes
    assert [node.model_dump() for node in nodes] == before
    assert runtime.warmed == ["one", "two"]


def test_progress_is_shown_where_asked(
    llm: SpecCacheLLM, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(runtime, "warm", lambda texts, show_progress, skip_bad: shown.append(show_progress))
    SpecCacheTransform(llm=llm)([])
    SpecCacheTransform(llm=llm, show_progress=True)([])
    SpecCacheTransform(llm=llm, show_progress=True)([], show_progress=False)
    assert shown == [False, True, False]


async def test_the_transform_leaves_the_event_loop_free(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    where: list[int] = []
    runtime.warm = lambda texts, show_progress, skip_bad: where.append(threading.get_ident())  # type: ignore
    nodes = [TextNode(text="one")]
    assert await SpecCacheTransform(llm=llm).acall(nodes) is nodes
    assert where != [threading.get_ident()]


def test_an_ingestion_pipeline_warms_once_and_its_cache_skips_the_step(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    document = Document(text=" ".join(f"Sentence {i} is here." for i in range(60)), id_="d")
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), SpecCacheTransform(llm=llm)]
    )
    nodes = pipeline.run(documents=[document])
    assert len(nodes) > 1
    assert runtime.warmed == [node.get_content() for node in nodes]
    again = pipeline.run(documents=[document])
    assert len(runtime.warmed) == len(nodes)  # the pipeline's own cache: its KV may be long gone
    llm.warm(again, show_progress=False)
    assert runtime.warmed[len(nodes) :] == [node.get_content() for node in nodes]


# Serialization.


@pytest.mark.parametrize("cls", [SpecCachePostprocessor, SpecCacheTransform])
def test_dict_json_and_pickle_round_trips(cls: Any) -> None:
    step = cls(llm=SpecCacheLLM(model="tiny", recompute_ratio=0.3, temperature=0.7))
    data = step.to_dict()
    assert data["class_name"] == cls.__name__
    assert data["llm"]["class_name"] == "SpecCacheLLM"
    for twin in (cls.from_dict(data), cls.from_json(step.to_json()), pickle.loads(pickle.dumps(step))):
        assert twin.to_dict() == data
        assert twin.llm.config == step.llm.config
