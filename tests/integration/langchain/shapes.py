"""The pipeline shapes of LangChain: LCEL, retrieval chains, graphs, agents, and who reads a stream where."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_classic.chains import RetrievalQA, create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough, chain
from pydantic import BaseModel

from langchain_speccache import SpecCacheCompletion, SpecCacheRetriever
from tests.integration.langchain.bench import (
    LINES,
    ONE,
    PROMPT,
    TWO,
    Bench,
    Chain,
    Shape,
    gathered,
    in_all_forms,
    join,
    reply,
)

AS_INPUT: Chain = RunnableLambda(lambda query: {"input": query})


class Found(BaseModel):
    """Which page it was."""

    page: int


# LCEL.


def lcel(bench: Bench) -> Chain:
    return {"context": bench.bare | join, "input": RunnablePassthrough()} | PROMPT | bench.llm | StrOutputParser()


def assigned(bench: Bench) -> Chain:
    context = (lambda x: x["input"]) | bench.described | join
    return AS_INPUT | RunnablePassthrough.assign(context=context) | PROMPT | bench.llm | StrOutputParser()


def sequence(bench: Bench) -> Chain:
    prompt = ChatPromptTemplate.from_template("{context}\n\nWhich page is this?")
    return bench.bare | join | prompt | bench.llm | StrOutputParser()


def imperative(bench: Bench) -> Chain:
    @chain
    def ask(query: str) -> str:
        context = join(bench.described.invoke(query))
        return bench.llm.invoke(PROMPT.invoke({"context": context, "input": query})).text

    return ask


def wrapped(bench: Bench) -> Chain:
    retriever = SpecCacheRetriever(retriever=bench.described, llm=bench.llm)
    return {"context": retriever | join, "input": RunnablePassthrough()} | PROMPT | bench.llm | StrOutputParser()


def completion(bench: Bench) -> Chain:
    prompt = PromptTemplate.from_template("{context}\n\nQ: {input}\nA:")
    llm = SpecCacheCompletion(runtime=bench.runtime)
    return {"context": bench.bare | join, "input": RunnablePassthrough()} | prompt | llm


def structured(bench: Bench) -> Chain:
    found = bench.llm.with_structured_output(Found)
    context = {"context": bench.bare | join, "input": RunnablePassthrough()}
    return context | PROMPT | found | (lambda found: f"From page {found.page}.")


def as_json(prompt: str) -> str:
    return json.dumps({"page": int(reply(prompt).removeprefix("From page ").removesuffix("."))})


def forgotten_format(bench: Bench) -> Chain:
    return {"context": bench.bare, "input": RunnablePassthrough()} | PROMPT | bench.llm | StrOutputParser()


def forgotten_format_of_lines(bench: Bench) -> Chain:
    return {"context": bench.lines, "input": RunnablePassthrough()} | PROMPT | bench.llm | StrOutputParser()


# Chains of langchain_classic.


def stuff(bench: Bench) -> Chain:
    documents = {"context": bench.bare, "input": RunnablePassthrough()}
    return documents | create_stuff_documents_chain(bench.llm, PROMPT)


def stuff_described(bench: Bench) -> Chain:
    shown = PromptTemplate.from_template("[{source}] {page_content}")
    combine = create_stuff_documents_chain(bench.llm, PROMPT, document_prompt=shown, document_separator="\n---\n")
    return {"context": bench.described, "input": RunnablePassthrough()} | combine


def retrieval_chain(bench: Bench) -> Chain:
    answering = create_retrieval_chain(bench.described, create_stuff_documents_chain(bench.llm, PROMPT))
    return AS_INPUT | answering.pick("answer")


def with_history(bench: Bench) -> Chain:
    rephrase = ChatPromptTemplate.from_messages([("placeholder", "{chat_history}"), ("human", "Rephrase: {input}")])
    retriever = create_history_aware_retriever(bench.llm, bench.bare, rephrase)
    answering = create_retrieval_chain(retriever, create_stuff_documents_chain(bench.llm, PROMPT))
    history = RunnablePassthrough.assign(chat_history=lambda _: [("human", "Hello"), ("ai", "Hello, ask me.")])
    return AS_INPUT | history | answering.pick("answer")


def retrieval_qa(bench: Bench, chain_type: str) -> Chain:
    answering = RetrievalQA.from_chain_type(bench.llm, chain_type=chain_type, retriever=bench.bare)
    return RunnableLambda(lambda query: {"query": query}) | answering | (lambda output: output["result"])


def with_score(prompt: str) -> str:
    return f"{reply(prompt)}\nScore: 90"


# Streams and callers.


def elsewhere(bench: Bench) -> list[str]:
    """The first piece is read here, the rest in another thread."""
    pieces = lcel(bench).stream(ONE[0])
    first = next(pieces)
    with ThreadPoolExecutor(1) as pool:
        return [first + pool.submit("".join, pieces).result()]


def interleaved(bench: Bench) -> list[str]:
    streams = [lcel(bench).stream(query) for query in TWO]
    pieces = itertools.zip_longest(*streams, fillvalue="")
    return ["".join(answer) for answer in zip(*pieces, strict=True)]


async def at_once(bench: Bench) -> list[str]:
    chain = lcel(bench)
    return list(await asyncio.gather(*(chain.ainvoke(query) for query in TWO)))


async def streams_at_once(bench: Bench) -> list[str]:
    chain = lcel(bench)
    return list(await asyncio.gather(*(gathered(chain.astream(query)) for query in TWO)))


async def in_task_of_its_own(bench: Bench) -> list[str]:
    """A stream begun in one task and read in another."""
    pieces = lcel(bench).astream(ONE[0])
    first = await asyncio.create_task(anext(pieces))
    return [first + await gathered(pieces)]


def in_threads(bench: Bench) -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lcel(bench).invoke, TWO))


def in_loops(bench: Bench) -> list[str]:
    """Each thread runs an event loop of its own."""

    def ask(query: str) -> str:
        return asyncio.run(gathered(lcel(bench).astream(query)))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, TWO))


def callers() -> Sequence[Shape]:
    return [
        Shape("LCEL", "stream, read on in another thread", elsewhere),
        Shape("LCEL", "two streams, interleaved", interleaved, TWO),
        Shape("LCEL", "asyncio.gather of ainvoke", at_once, TWO),
        Shape("LCEL", "asyncio.gather of astream", streams_at_once, TWO),
        Shape("LCEL", "astream, begun in another task", in_task_of_its_own),
        Shape("LCEL", "thread pool", in_threads, TWO),
        Shape("LCEL", "an event loop in each thread", in_loops, TWO),
    ]


def chains() -> Sequence[Shape]:
    def qa(chain_type: str, **facts: Any) -> list[Shape]:
        return in_all_forms(f"`RetrievalQA`, {chain_type}", lambda bench: retrieval_qa(bench, chain_type), **facts)

    return [
        *in_all_forms('`{"context": r \\| join, ...} \\| prompt \\| llm`', lcel),
        *callers(),
        *in_all_forms("`RunnablePassthrough.assign(context=...) \\| prompt \\| llm`", assigned),
        *in_all_forms("`r \\| join \\| prompt \\| llm`", sequence),
        *in_all_forms("`@chain` function", imperative),
        *in_all_forms("`SpecCacheRetriever` around the retriever", wrapped),
        *in_all_forms("`SpecCacheCompletion`", completion),
        *in_all_forms("`llm.with_structured_output(...)`", structured, reply=as_json),
        *in_all_forms("`create_stuff_documents_chain`", stuff),
        *in_all_forms(
            "`create_stuff_documents_chain`, `document_prompt` and `document_separator` given", stuff_described
        ),
        *in_all_forms("`create_retrieval_chain`", retrieval_chain),
        *in_all_forms("`create_retrieval_chain` behind `create_history_aware_retriever`", with_history),
        *qa("stuff"),
        *qa("map_reduce"),
        *qa("refine"),
        *qa("map_rerank", reply=with_score),
        *in_all_forms(
            "documents put into the prompt unjoined, texts of several lines", forgotten_format, matches=False
        ),
        *in_all_forms(
            "documents put into the prompt unjoined, texts of one line", forgotten_format_of_lines, texts=LINES
        ),
    ]
