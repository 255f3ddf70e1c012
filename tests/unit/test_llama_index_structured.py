"""Structured output: the schema goes to an engine that can hold itself to it, and objects come back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.speccache import SpecCacheLLM
from pydantic import BaseModel, ValidationError

from speccache_rag.config import SpecCacheConfig
from tests.unit.fake_runtime import FakeRuntime, LoadingRuntime


class Mill(BaseModel):
    """A mill."""

    year: int
    village: str


PIECES = ('{"year": 18', '92, "village"', ': "Arden"}')
ARDEN = Mill(year=1892, village="Arden")
PROMPT = PromptTemplate("When was the mill of {village} built?")
GUIDED = {"json": Mill.model_json_schema()}


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(pieces=PIECES)


@pytest.fixture
def llm(runtime: FakeRuntime) -> SpecCacheLLM:
    return SpecCacheLLM(runtime=runtime)


def params(runtime: FakeRuntime) -> dict[str, Any]:
    [(_, given)] = runtime.calls
    return given


def test_structured_predict(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    assert llm.structured_predict(Mill, PROMPT, village="Arden") == ARDEN
    [(prompt, given)] = runtime.calls
    assert given == {"temperature": 0.0, "structured_outputs": GUIDED}
    assert prompt[0]["content"].startswith("When was the mill of Arden built?")


async def test_astructured_predict(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    assert await llm.astructured_predict(Mill, PROMPT, village="Arden") == ARDEN
    assert params(runtime)["structured_outputs"] == GUIDED


async def test_no_event_loop_waits_for_the_engine() -> None:
    runtime = LoadingRuntime(pieces=PIECES)
    llm = SpecCacheLLM(runtime=runtime)
    assert await llm.astructured_predict(Mill, PROMPT, village="Arden") == ARDEN
    assert runtime.asked[0] != threading.get_ident()  # when LlamaIndex's own code asks, it is there


def test_stream_structured_predict(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    objects = list(llm.stream_structured_predict(Mill, PROMPT, village="Arden"))
    assert objects[-1] == ARDEN
    assert objects[0] != ARDEN
    assert params(runtime)["structured_outputs"] == GUIDED


async def test_astream_structured_predict(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    objects = [o async for o in await llm.astream_structured_predict(Mill, PROMPT, village="Arden")]
    assert objects[-1] == ARDEN
    assert params(runtime)["structured_outputs"] == GUIDED


def test_as_structured_llm(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    response = llm.as_structured_llm(Mill).chat([ChatMessage(role="user", content="When? {braces} stay.")])
    assert response.raw == ARDEN
    [(prompt, given)] = runtime.calls
    assert given["structured_outputs"] == GUIDED
    assert "{braces} stay." in prompt[0]["content"]


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "accumulate"])
def test_query_engines(llm: SpecCacheLLM, runtime: FakeRuntime, mode: str) -> None:
    index = SummaryIndex([TextNode(text="The mill of Arden was built in 1892.")])
    response = index.as_query_engine(llm=llm, output_cls=Mill, response_mode=mode).query("When?")
    assert "1892" in str(response)
    assert params(runtime)["structured_outputs"] == GUIDED
    if mode == "compact":
        assert response.response == ARDEN


def test_a_calls_own_arguments_win(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    own = {"structured_outputs": {"json_object": True}, "max_tokens": 9}
    llm.structured_predict(Mill, PROMPT, own, village="Arden")
    assert params(runtime) == {"temperature": 0.0, **own}


def test_other_engines_are_asked_in_the_prompt_alone() -> None:
    runtime = FakeRuntime(SpecCacheConfig(model="tiny", engine="transformers"), pieces=PIECES)
    llm = SpecCacheLLM(runtime=runtime)
    assert llm.structured_predict(Mill, PROMPT, {"seed": 1}, village="Arden") == ARDEN
    [(prompt, given)] = runtime.calls
    assert given == {"temperature": 0.0, "seed": 1}
    assert '"village"' in prompt[0]["content"]


def test_objects_that_come_out_of_tool_calls_are_not_held_to_the_schema(runtime: FakeRuntime) -> None:
    assert not SpecCacheLLM(runtime=runtime, pydantic_program_mode=PydanticProgramMode.FUNCTION).guides_decoding
    assert SpecCacheLLM(runtime=runtime).guides_decoding


def test_an_answer_that_does_not_fit_is_llama_indexs_error() -> None:
    llm = SpecCacheLLM(runtime=FakeRuntime(pieces=('{"year": "long ago"}',)))
    with pytest.raises(ValidationError, match="village"):
        llm.structured_predict(Mill, PROMPT, village="Arden")
