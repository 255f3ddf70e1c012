"""Whole pipelines on a real engine that answers for itself: ingestion, stores, streams, events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document
from llama_index.llms.speccache import SpecCacheLLM, SpecCacheReuseEvent, install
from llama_index.retrievers.speccache import SpecCacheRetriever, SpecCacheTransform

from speccache_rag import SpecCache
from tests.hosts import known
from tests.integration.llama_index.shapes import CHUNKS, QUESTION, Found, engine, node

EMBEDDING = MockEmbedding(8)
STORY = "\n\n".join(
    f"In the year {year} the keeper of lighthouse {year} wrote:\n  the wind came from the north, {year - 1800} boats "
    "stayed in the harbour until the evening, when the rain was over."
    for year in range(1880, 1890)
)


class Reports(BaseEventHandler):
    """Collects reuse events."""

    seen: list[SpecCacheReuseEvent] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, SpecCacheReuseEvent):
            self.seen.append(event)


@pytest.fixture
def reports() -> Iterator[list[SpecCacheReuseEvent]]:
    handler = Reports(seen=[])
    handlers = get_dispatcher().event_handlers
    get_dispatcher().event_handlers = [*handlers, handler]
    yield handler.seen
    get_dispatcher().event_handlers = handlers


@pytest.fixture
def llm(runtime: SpecCache) -> SpecCacheLLM:
    return SpecCacheLLM(runtime=runtime, max_tokens=6)


def used(event: SpecCacheReuseEvent) -> tuple[int, int]:
    """Chunks reused, and chunk tokens whose stored KV was taken or replaced."""
    report = event.report
    return report["chunks_reused"], report["loaded_tokens"] + report["recomputed_tokens"] + report["cached_tokens"]


def test_nodes_come_back_from_chroma_as_they_were_warmed(llm: SpecCacheLLM, reports: list[SpecCacheReuseEvent]) -> None:
    chromadb = pytest.importorskip("chromadb", reason="chromadb is not installed")
    stores = pytest.importorskip("llama_index.vector_stores.chroma", reason="its LlamaIndex store is not installed")
    collection = chromadb.EphemeralClient().get_or_create_collection("villages", embedding_function=None)
    storage = StorageContext.from_defaults(vector_store=stores.ChromaVectorStore(chroma_collection=collection))
    VectorStoreIndex([node(name) for name in "ABCD"], storage_context=storage, embed_model=EMBEDDING)
    reopened = VectorStoreIndex.from_vector_store(storage.vector_store, embed_model=EMBEDDING)
    reopened.as_query_engine(llm=llm, similarity_top_k=4).query(QUESTION)
    (event,) = reports
    assert used(event) == (4, sum(known(llm.runtime, CHUNKS[name]).n_tokens for name in "ABCD"))
    assert event.report["missed_tokens"] == 0


def test_what_ingestion_warmed_is_reused(llm: SpecCacheLLM, reports: list[SpecCacheReuseEvent]) -> None:
    splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
    pipeline = IngestionPipeline(transformations=[splitter, SpecCacheTransform(llm=llm), EMBEDDING])
    before = llm.runtime.stats()["known_chunks"]
    nodes = pipeline.run(documents=[Document(text=STORY, metadata={"source": "a log"})])
    assert llm.runtime.stats()["known_chunks"] - before == len(nodes) >= 5
    assert llm.warm(nodes, show_progress=False).n_captured == 0
    index = VectorStoreIndex(nodes, embed_model=EMBEDDING)
    index.as_query_engine(llm=llm, similarity_top_k=5).query(QUESTION)
    (event,) = reports
    assert event.report["chunks_reused"] == 5
    assert event.report["missed_tokens"] == 0


@pytest.mark.parametrize("way", ["wrapper", "hook"])
async def test_what_nobody_warmed_is_reused_from_the_second_prompt_on(
    llm: SpecCacheLLM, reports: list[SpecCacheReuseEvent], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Text that {way} prefetches:\nno run before this one has ever seen it, and no transform warmed it either."
    monkeypatch.setitem(CHUNKS, "N", text)
    hook = install(llm) if way == "hook" else None
    retriever = Found("N") if hook else SpecCacheRetriever(Found("N"), llm=llm)
    asked = engine(llm, retriever=retriever)
    before = llm.runtime.stats()["recaptured"]
    await asked.aquery(QUESTION)
    assert used(reports[0]) == (0, 0)
    assert reports[0].report["missed_tokens"] > 0
    for _ in range(100):  # captured in the background
        if llm.runtime.stats()["recaptured"] > before:
            break
        await asyncio.sleep(0.05)
    await asked.aquery(QUESTION)
    if hook:
        hook.remove()
    assert used(reports[1]) == (1, known(llm.runtime, text).n_tokens)


def test_streams_read_in_turns_say_what_they_say_alone(llm: SpecCacheLLM, reports: list[SpecCacheReuseEvent]) -> None:
    alone = [str(engine(llm, names).query(QUESTION)) for names in ("AB", "CD")]
    streams = [engine(llm, names, streaming=True).query(QUESTION).response_gen for names in ("AB", "CD")]
    texts = ["", ""]
    running = [0, 1]
    while running:
        for i in list(running):
            piece = next(streams[i], None)
            if piece is None:
                running.remove(i)
            else:
                texts[i] += piece
    # LlamaIndex before 0.14.25 takes the space from the beginning of what it streams.
    assert [text.lstrip() for text in texts] == [text.lstrip() for text in alone]
    assert [used(event) for event in reports[2:]] == [used(event) for event in reports[:2]]
    assert alone[0] != alone[1]


def test_a_system_turn_reaches_a_model_that_has_none(
    llm: SpecCacheLLM, reports: list[SpecCacheReuseEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.runtime.tokenizer
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + tokenizer.chat_template)
    llm.chat([ChatMessage(role="system", content=f"Read this.\n\n{CHUNKS['A']}"), ChatMessage(content=QUESTION)])
    assert reports[0].report["chunks_reused"] == 1


def test_logprobs_carry_the_texts_of_tokens(llm: SpecCacheLLM) -> None:
    response = llm.chat([ChatMessage(content="Why?")], logprobs=2, ignore_eos=True)
    assert response.logprobs is not None
    assert len(response.logprobs) == 6
    assert "".join(step[0].token for step in response.logprobs) == response.message.content
    assert all(step[0].logprob == max(entry.logprob for entry in step) < 0 for step in response.logprobs)
