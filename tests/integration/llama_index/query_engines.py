"""Query engines: response modes, ways to call them, and engines made of others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llama_index.core import StorageContext, VectorStoreIndex, get_response_synthesizer
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import LLMRerank, LongContextReorder, MetadataReplacementPostProcessor
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever
from llama_index.core.schema import Document, NodeRelationship, TextNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.speccache import SpecCacheLLM
from llama_index.retrievers.speccache import SpecCachePostprocessor, SpecCacheRetriever
from pydantic import BaseModel

from tests.integration.llama_index.shapes import CHUNKS, QUESTION, Found, Shape, drained, engine, node


class Answer(BaseModel):
    year: int


JSON_ANSWER = '{"year":1892}'
SUB_QUESTIONS = json.dumps(
    {"items": [{"sub_question": name, "tool_name": "village"} for name in ("the mill?", "the bridge?")]}
)
CHOICE = json.dumps([{"choice": 1, "reason": "there is no other"}])
RANKS = "Doc: 2, Relevance: 9\nDoc: 1, Relevance: 8"


def ask(names: str = "ABC", question: str = QUESTION, **options: Any) -> Callable[[SpecCacheLLM], Any]:
    return lambda llm: engine(llm, names, **options).query(question)


def aask(**options: Any) -> Callable[[SpecCacheLLM], Any]:
    return lambda llm: engine(llm, **options).aquery(QUESTION)


def stream(llm: SpecCacheLLM, names: str = "ABC", **options: Any) -> Any:
    return engine(llm, names, streaming=True, **options).query(QUESTION)


async def astream(llm: SpecCacheLLM) -> str:
    # Asked in a task of its own, read in another: whatever a retriever leaves in the context is gone by then.
    response = await asyncio.create_task(engine(llm, streaming=True).aquery(QUESTION))
    return await drained(response.response_gen)


def stream_read_elsewhere(llm: SpecCacheLLM) -> str:
    response = stream(llm)
    with ThreadPoolExecutor(1) as pool:
        return "".join(pool.submit(list, response.response_gen).result())


def interleaved_streams(llm: SpecCacheLLM) -> str:
    first, second = iter(stream(llm, "AB").response_gen), iter(stream(llm, "CD").response_gen)
    text = ""
    for one, other in zip(first, second, strict=True):
        text += one + other
    return text


async def gathered(llm: SpecCacheLLM) -> str:
    answers = await asyncio.gather(*(engine(llm, names).aquery(QUESTION) for names in ("AB", "CD")))
    return " ".join(map(str, answers))


def pooled(llm: SpecCacheLLM) -> str:
    with ThreadPoolExecutor(4) as pool:
        return " ".join(map(str, pool.map(lambda names: engine(llm, names).query(QUESTION), ["AB", "BC", "CD", "DA"])))


async def retrieved_elsewhere(llm: SpecCacheLLM) -> Any:
    nodes = await asyncio.to_thread(Found("ABC").retrieve, QUESTION)
    return await get_response_synthesizer(llm=llm).asynthesize(QUESTION, nodes)


def fusion(llm: SpecCacheLLM, *, use_async: bool) -> Any:
    retriever = QueryFusionRetriever(
        [Found("AB"), Found("BC")], llm=llm, num_queries=3, similarity_top_k=3, use_async=use_async
    )
    return engine(llm, retriever=retriever).query(QUESTION)


def citation(llm: SpecCacheLLM) -> Any:
    return CitationQueryEngine.from_args(VectorStoreIndex([]), llm=llm, retriever=Found("ABC")).query(QUESTION)


def sub_question(llm: SpecCacheLLM, *, use_async: bool) -> Any:
    tool = QueryEngineTool.from_defaults(engine(llm), name="village", description="villages")
    generator = LLMQuestionGenerator.from_defaults(llm)
    return SubQuestionQueryEngine.from_defaults(
        [tool], llm=llm, question_gen=generator, use_async=use_async, verbose=False
    ).query(QUESTION)


def router(llm: SpecCacheLLM) -> Any:
    tool = QueryEngineTool.from_defaults(engine(llm), name="village", description="villages")
    return RouterQueryEngine.from_defaults([tool], llm=llm, selector=LLMSingleSelector.from_defaults(llm)).query(
        QUESTION
    )


def hyde(llm: SpecCacheLLM) -> Any:
    return TransformQueryEngine(engine(llm), HyDEQueryTransform(llm=llm)).query(QUESTION)


def auto_merging(llm: SpecCacheLLM) -> Any:
    children = [TextNode(id_=name, text=CHUNKS[name]) for name in "AB"]
    parent = node("AB", relationships={NodeRelationship.CHILD: [child.as_related_node_info() for child in children]})
    for child in children:
        child.relationships[NodeRelationship.PARENT] = parent.as_related_node_info()
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents([parent, *children])
    index = VectorStoreIndex(children, storage_context=storage)
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=2), storage)
    return engine(llm, retriever=retriever).query(QUESTION)


def sentence_window(llm: SpecCacheLLM) -> Any:
    parser = SentenceWindowNodeParser.from_defaults(window_size=2)
    sentences = parser.get_nodes_from_documents([Document(text=CHUNKS["S"].replace("  ", " "))])
    retriever = VectorStoreIndex(sentences[1:2]).as_retriever()
    windows = MetadataReplacementPostProcessor("window")
    return engine(llm, retriever=retriever, node_postprocessors=[windows, SpecCachePostprocessor(llm=llm)]).query(
        QUESTION
    )


def structured_llm(llm: SpecCacheLLM) -> Any:
    return engine(llm.as_structured_llm(Answer)).query(QUESTION)


TEMPLATE = RichPromptTemplate("Context: {{ context_str }}\nQuestion: {{ query_str }}")

SHAPES = [
    # Response modes.
    Shape("compact", "query", ask(), ("A B C",)),
    Shape("refine", "query", ask(response_mode="refine"), ("A", "B", "C")),
    Shape("tree_summarize", "query", ask(response_mode="tree_summarize"), ("A B C",)),
    Shape("tree_summarize", "query, use_async", ask(response_mode="tree_summarize", use_async=True), ("A B C",)),
    Shape("accumulate", "query", ask(response_mode="accumulate"), ("A", "B", "C"), answer=None),
    Shape(
        "accumulate", "query, use_async", ask(response_mode="accumulate", use_async=True), ("A", "B", "C"), answer=None
    ),
    Shape("compact_accumulate", "query", ask(response_mode="compact_accumulate"), ("A B C",), answer=None),
    Shape("simple_summarize, one-line chunks", "query", ask("C", response_mode="simple_summarize"), ("C",)),
    Shape("simple_summarize, others", "query", ask("AD", response_mode="simple_summarize"), ("!A !D",)),
    Shape("generation", "query", ask(response_mode="generation"), ("",)),
    Shape("compact, multimodal", "query", ask(multimodal=True), ("A B C",)),
    Shape("compact, RichPromptTemplate", "query", ask(text_qa_template=TEMPLATE), ("A B C",)),
    # Too long for the model: LlamaIndex cuts.
    Shape("compact, cut by the context window", "query", ask("ABDC"), ("A B D|", "C"), context=990),
    # Ways to call.
    Shape("compact", "aquery", aask(), ("A B C",)),
    Shape("compact", "streaming", lambda llm: stream(llm), ("A B C",)),
    Shape("compact", "streaming, read in another thread", stream_read_elsewhere, ("A B C",)),
    Shape("compact", "aquery streaming, read in another task", astream, ("A B C",)),
    Shape("compact", "two interleaved streams", interleaved_streams, ("A B", "C D"), answer="OKOK"),
    Shape("compact", "asyncio.gather", gathered, ("A B", "C D"), answer="OK OK"),
    Shape("compact", "ThreadPoolExecutor", pooled, ("A B", "B C", "C D", "D A"), answer="OK OK OK OK"),
    Shape("compact", "retrieve in a thread, asynthesize", retrieved_elsewhere, ("A B C",)),
    Shape("tree_summarize", "streaming", lambda llm: stream(llm, response_mode="tree_summarize"), ("A B C",)),
    # Postprocessors and retrievers.
    Shape("LongContextReorder", "query", ask(node_postprocessors=[LongContextReorder()]), ("A C B",)),
    Shape(
        "LLMRerank",
        "query",
        lambda llm: engine(llm, node_postprocessors=[LLMRerank(llm=llm, top_n=2)]).query(QUESTION),
        ("A B C", "B A"),
        [RANKS],
    ),
    Shape("SentenceWindow, MetadataReplacement", "query", sentence_window, ("S",)),
    Shape("AutoMergingRetriever", "query", auto_merging, ("AB",)),
    Shape("QueryFusionRetriever", "query", lambda llm: fusion(llm, use_async=False), ("", "A B C"), ["one\ntwo"]),
    Shape(
        "QueryFusionRetriever", "query, use_async", lambda llm: fusion(llm, use_async=True), ("", "A B C"), ["one\ntwo"]
    ),
    Shape(
        "SpecCacheRetriever",
        "query",
        lambda llm: engine(llm, retriever=SpecCacheRetriever(Found("ABC"), llm=llm)).query(QUESTION),
        ("A B C",),
    ),
    # Engines made of engines.
    Shape("CitationQueryEngine", "query", citation, ("A B C",)),
    Shape(
        "SubQuestionQueryEngine",
        "query",
        lambda llm: sub_question(llm, use_async=False),
        ("", "A B C", "A B C", ""),
        [SUB_QUESTIONS],
    ),
    Shape(
        "SubQuestionQueryEngine",
        "query, use_async",
        lambda llm: sub_question(llm, use_async=True),
        ("", "A B C", "A B C", ""),
        [SUB_QUESTIONS],
    ),
    Shape("RouterQueryEngine", "query", router, ("", "A B C"), [CHOICE]),
    Shape("TransformQueryEngine, HyDE", "query", hyde, ("", "A B C")),
    # Structured output.
    Shape("output_cls", "query", ask(output_cls=Answer), ("A B C",), [JSON_ANSWER], answer=JSON_ANSWER),
    Shape("output_cls", "aquery", aask(output_cls=Answer), ("A B C",), [JSON_ANSWER], answer=JSON_ANSWER),
    Shape("as_structured_llm", "query", structured_llm, ("A B C",), [JSON_ANSWER], answer=JSON_ANSWER),
]
