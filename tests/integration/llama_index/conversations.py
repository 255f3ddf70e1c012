"""Chat engines over several turns, and agents that look things up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import RetrieverTool
from llama_index.llms.speccache import SpecCacheLLM

from tests.integration.llama_index.shapes import QUESTION, Found, Shape, drained, engine

TURNS = ("ABC", "BCD", "ABC")
"""Each question of the user names the chunks it finds."""
LOOK_UP = 'Thought: I need the tool.\nAction: village\nAction Input: {"input": "ABC"}'
ANSWER = "Thought: I can answer without using any more tools.\nAnswer: OK"
CALLS = [f'<tool_call>\n{{"name": "village", "arguments": {{"input": "{names}"}}}}\n</tool_call>' for names in TURNS]
"""What a model answers that looks each of `TURNS` up."""

Make = Callable[[SpecCacheLLM], Any]


def context(llm: SpecCacheLLM) -> Any:
    return ContextChatEngine.from_defaults(retriever=Found(), llm=llm, system_prompt="Be brief.")


def condense_plus_context(llm: SpecCacheLLM) -> Any:
    return CondensePlusContextChatEngine.from_defaults(retriever=Found(), llm=llm, system_prompt="Be brief.")


def condense_question(llm: SpecCacheLLM) -> Any:
    return CondenseQuestionChatEngine.from_defaults(engine(llm, retriever=Found()), llm=llm)


def chat(make: Make) -> Make:
    def run(llm: SpecCacheLLM) -> Any:
        chat_engine = make(llm)
        return [chat_engine.chat(turn) for turn in TURNS][-1]

    return run


def stream_chat(make: Make) -> Make:
    def run(llm: SpecCacheLLM) -> str:
        chat_engine = make(llm)
        return ["".join(chat_engine.stream_chat(turn).response_gen) for turn in TURNS][-1]

    return run


def achat(make: Make) -> Make:
    async def run(llm: SpecCacheLLM) -> Any:
        chat_engine = make(llm)
        return [await chat_engine.achat(turn) for turn in TURNS][-1]

    return run


def astream_chat(make: Make) -> Make:
    async def run(llm: SpecCacheLLM) -> str:
        chat_engine = make(llm)
        return [await drained((await chat_engine.astream_chat(turn)).async_response_gen()) for turn in TURNS][-1]

    return run


def tool() -> RetrieverTool:
    return RetrieverTool.from_defaults(Found(), name="village", description="Finds facts.")


async def react(llm: SpecCacheLLM) -> str:
    return str(await ReActAgent(tools=[tool()], llm=llm).run(QUESTION))


async def function_agent(llm: SpecCacheLLM, *, streaming: bool, turns: Sequence[str] = (QUESTION,)) -> str:
    agent = FunctionAgent(tools=[tool()], llm=llm, streaming=streaming)
    memory = ChatMemoryBuffer.from_defaults(token_limit=10_000)
    return [str(await agent.run(turn, memory=memory)) for turn in turns][-1]


def rewritten(prompt: str) -> str:
    """The rewritten question is the user's own last one."""
    if "standalone question" not in prompt:
        return "OK"
    return next(turn for turn in (TURNS[2], TURNS[1]) if turn in prompt.rpartition("OK")[2])


SHAPES = [
    Shape("ContextChatEngine", "chat, 3 turns", chat(context), ("A B C", "B C D", "A B C")),
    Shape("ContextChatEngine", "stream_chat, 3 turns", stream_chat(context), ("A B C", "B C D", "A B C")),
    Shape("ContextChatEngine", "achat, 3 turns", achat(context), ("A B C", "B C D", "A B C")),
    Shape("ContextChatEngine", "astream_chat, 3 turns", astream_chat(context), ("A B C", "B C D", "A B C")),
    *(
        Shape(
            "CondensePlusContextChatEngine",
            f"{call.__name__}, 3 turns",
            call(condense_plus_context),
            ("A B C", "", "B C D", "", "A B C"),
            rewritten,
        )
        for call in (chat, stream_chat, achat, astream_chat)
    ),
    Shape(
        "CondenseQuestionChatEngine",
        "chat, 3 turns",
        chat(condense_question),
        ("A B C", "", "B C D", "", "A B C"),
        rewritten,
    ),
    Shape("ReActAgent, RetrieverTool", "run", react, ("", "A B C"), [LOOK_UP, ANSWER]),
    Shape(
        "FunctionAgent, RetrieverTool",
        "run",
        lambda llm: function_agent(llm, streaming=False),
        ("", "A B C"),
        CALLS[:1],
    ),
    Shape(
        "FunctionAgent, RetrieverTool",
        "run, streaming",
        lambda llm: function_agent(llm, streaming=True),
        ("", "A B C"),
        CALLS[:1],
    ),
    Shape(
        "FunctionAgent, RetrieverTool",
        "run, 3 turns",
        lambda llm: function_agent(llm, streaming=False, turns=TURNS),
        ("", "A B C", "A B C", "A B C B C D", "A B C B C D", "A B C B C D A B C"),
        [CALLS[0], "OK", CALLS[1], "OK", CALLS[2], "OK"],
    ),
]
