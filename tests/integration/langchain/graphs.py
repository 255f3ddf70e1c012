"""Graphs and agents: LangGraph's retrieve and generate, and an agent with a retriever for its tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.tools import create_retriever_tool
from langgraph.graph import END, START, StateGraph

from tests.integration.langchain.bench import ONE, PROMPT, TWO, Bench, Shape, call_or_reply, join

TURNS = ("query 0", "query 3", "query 0")
"""What a user asks an agent, one after the other."""
IN_PROMPTS = tuple(query for turn in range(3) for n in (turn, turn + 1) for query in TURNS[:n])
"""Each turn takes two prompts: one that ends in a tool call, and one that holds its result too."""


class State(TypedDict, total=False):
    """What the nodes of the graph pass on."""

    query: str
    documents: list[Document]
    answer: str


def _graph(retrieve: Any, generate: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("retrieve", retrieve)
    builder.add_node("generate", generate)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "generate")
    builder.add_edge("generate", END)
    return builder.compile()


def _prompt(state: State) -> Any:
    return PROMPT.invoke({"context": join(state["documents"]), "input": state["query"]})


def graph(bench: Bench) -> Any:
    """Retrieve, then generate, in nodes that are plain functions."""
    return _graph(
        lambda state: {"documents": bench.described.invoke(state["query"])},
        lambda state: {"answer": bench.llm.invoke(_prompt(state)).text},
    )


def agraph(bench: Bench) -> Any:
    """The same in coroutines."""

    async def retrieve(state: State) -> State:
        return {"documents": await bench.described.ainvoke(state["query"])}

    async def generate(state: State) -> State:
        return {"answer": (await bench.llm.ainvoke(_prompt(state))).text}

    return _graph(retrieve, generate)


async def _graph_ainvoke(bench: Bench) -> list[str]:
    return [(await graph(bench).ainvoke({"query": ONE[0]}))["answer"]]


async def _agraph_ainvoke(bench: Bench) -> list[str]:
    return [(await agraph(bench).ainvoke({"query": ONE[0]}))["answer"]]


def _graph_stream(bench: Bench) -> list[str]:
    *_, last = graph(bench).stream({"query": ONE[0]})
    return [last["generate"]["answer"]]


async def _agraph_astream(bench: Bench) -> list[str]:
    updates = [update async for update in agraph(bench).astream({"query": ONE[0]})]
    return [updates[-1]["generate"]["answer"]]


def _graph_stream_messages(bench: Bench) -> list[str]:
    pieces = list(graph(bench).stream({"query": ONE[0]}, stream_mode="messages"))
    assert len(pieces) > 2  # streamed, although the node only invokes
    return ["".join(message.text for message, _ in pieces)]


async def _agraph_astream_messages(bench: Bench) -> list[str]:
    pieces = [piece async for piece in agraph(bench).astream({"query": ONE[0]}, stream_mode="messages")]
    assert len(pieces) > 2
    return ["".join(message.text for message, _ in pieces)]


def _agent(bench: Bench) -> Any:
    tool = create_retriever_tool(bench.bare, "log", "Finds pages of the log.")
    return create_agent(bench.llm, [tool], system_prompt="Answer from the log.")


def _asked(query: str) -> Any:
    return {"messages": [("human", query)]}


def _last(state: Any) -> str:
    return str(state["messages"][-1].text)


def _agent_invoke(bench: Bench) -> list[str]:
    return [_last(_agent(bench).invoke(_asked(ONE[0])))]


async def _agent_ainvoke(bench: Bench) -> list[str]:
    return [_last(await _agent(bench).ainvoke(_asked(ONE[0])))]


def _agent_stream(bench: Bench) -> list[str]:
    *_, last = _agent(bench).stream(_asked(ONE[0]), stream_mode="values")
    return [_last(last)]


async def _agent_astream(bench: Bench) -> list[str]:
    states = [state async for state in _agent(bench).astream(_asked(ONE[0]), stream_mode="values")]
    return [_last(states[-1])]


def _agent_batch(bench: Bench) -> list[str]:
    return [_last(state) for state in _agent(bench).batch([_asked(query) for query in TWO])]


async def _agent_abatch(bench: Bench) -> list[str]:
    return [_last(state) for state in await _agent(bench).abatch([_asked(query) for query in TWO])]


def _agent_turns(bench: Bench) -> list[str]:
    """A conversation: each turn's prompts hold what was found before."""
    agent, messages, answers = _agent(bench), [], []
    for query in TURNS:
        state = agent.invoke({"messages": [*messages, ("human", query)]})
        messages = state["messages"]
        answers.append(_last(state))
    return answers


def _agent_stream_messages(bench: Bench) -> list[str]:
    """Tool calls and answer, token by token."""
    pieces = list(_agent(bench).stream(_asked(ONE[0]), stream_mode="messages"))
    assert any(getattr(message, "tool_call_chunks", None) for message, _ in pieces)
    *_, (last, _) = pieces
    return ["".join(message.text for message, _ in pieces if message.id == last.id)]


def graphs() -> Sequence[Shape]:
    """All shapes of this file."""

    def agents(call: str, run: Any, queries: Sequence[str] = ONE, **facts: Any) -> Shape:
        return Shape("`create_agent` with `create_retriever_tool`", call, run, queries, reply=call_or_reply, **facts)

    nodes = "LangGraph, retrieve and generate"
    return [
        Shape(nodes, "invoke", lambda bench: [graph(bench).invoke({"query": ONE[0]})["answer"]]),
        Shape(nodes, "ainvoke", _graph_ainvoke),
        Shape(nodes, "ainvoke, async nodes", _agraph_ainvoke),
        Shape(nodes, "stream", _graph_stream),
        Shape(nodes, "astream, async nodes", _agraph_astream),
        Shape(nodes, "stream of messages", _graph_stream_messages),
        Shape(nodes, "astream of messages, async nodes", _agraph_astream_messages),
        agents("invoke", _agent_invoke),
        agents("ainvoke", _agent_ainvoke),
        agents("stream", _agent_stream),
        agents("astream", _agent_astream),
        agents("batch", _agent_batch, TWO),
        agents("abatch", _agent_abatch, TWO),
        agents("stream of messages", _agent_stream_messages),
        agents("invoke, 3 turns", _agent_turns, TURNS, in_prompts=IN_PROMPTS),
    ]
