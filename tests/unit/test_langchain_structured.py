"""`with_structured_output`: what the engine is held to, and what the caller is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from langchain_speccache import ChatSpecCache
from speccache_rag import SpecCache
from speccache_rag.errors import ConfigurationError
from speccache_rag.types import Completion
from tests.tiny import tiny_tokenizer
from tests.unit.fake_runtime import FakeRuntime


class Mill(BaseModel):
    """A mill."""

    name: str
    year: int | None = None


class MillDict(TypedDict):
    """A mill."""

    name: str
    year: int


ARDEN = ['{"name": ', '"Arden", "year"', ": 1892}"]
AS_DICT = {"name": "Arden", "year": 1892}


@pytest.fixture
def runtime(tmp_path: Path) -> FakeRuntime:
    return FakeRuntime(pieces=ARDEN, tokenizer=tiny_tokenizer(tmp_path))


@pytest.fixture
def llm(runtime: FakeRuntime) -> ChatSpecCache:
    return ChatSpecCache(runtime=runtime)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Mill, Mill(name="Arden", year=1892)),
        (MillDict, AS_DICT),
        (Mill.model_json_schema(), AS_DICT),
        (convert_to_openai_tool(Mill), AS_DICT),
    ],
    ids=["pydantic", "typed dict", "JSON schema", "function schema"],
)
async def test_every_kind_of_schema(llm: ChatSpecCache, runtime: FakeRuntime, schema: Any, expected: Any) -> None:
    mills = llm.with_structured_output(schema)
    assert mills.invoke("Which mill?") == expected
    assert await mills.ainvoke("Which mill?") == expected
    *_, last = mills.stream("Which mill?")
    assert last == expected
    json_schema = convert_to_json_schema(schema)
    assert set(json_schema["properties"]) == {"name", "year"}
    assert [params["structured_outputs"] for _, params in runtime.calls] == [{"json": json_schema}] * 3


def test_json_mode_asks_for_any_json(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    assert llm.with_structured_output(Mill, method="json_mode").invoke("Which mill?").name == "Arden"
    assert runtime.calls[0][1]["structured_outputs"] == {"json_object": True}


def test_function_calling_is_decoding_under_the_schema_too(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    llm.with_structured_output(Mill, method="function_calling", strict=True).invoke("Which mill?")
    assert "json" in runtime.calls[0][1]["structured_outputs"]


def test_other_arguments_go_with_every_call(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    llm.with_structured_output(Mill, max_tokens=9, policy="full_reuse").invoke("Which mill?")
    params = runtime.calls[0][1]
    assert (params["max_tokens"], params["policy"]) == (9, "full_reuse")


def test_an_unknown_method_is_refused(llm: ChatSpecCache) -> None:
    with pytest.raises(ValueError, match="method is 'yaml'; known: json_schema, function_calling, json_mode"):
        llm.with_structured_output(Mill, method="yaml")


def test_raw_answers_are_given_on_request(llm: ChatSpecCache) -> None:
    output = llm.with_structured_output(Mill, include_raw=True).invoke("Which mill?")
    assert output["raw"].usage_metadata["output_tokens"] == 3
    assert (output["parsed"], output["parsing_error"]) == (Mill(name="Arden", year=1892), None)


class CutShort(FakeRuntime):
    """Ends every answer at max_tokens."""

    def _completion(self, *args: Any) -> Completion:
        return replace(super()._completion(*args), finish_reason="length")


async def test_an_answer_that_was_cut_short_is_an_error(runtime: FakeRuntime) -> None:
    # LangChain's parsers would close the braces themselves and hand out half an object.
    cut = ChatSpecCache(runtime=CutShort(pieces=ARDEN[:2], tokenizer=runtime.tokenizer))
    mills = cut.with_structured_output(MillDict)
    with pytest.raises(OutputParserException, match="cut before its end, at max_tokens"):
        mills.invoke("Which mill?")
    with pytest.raises(OutputParserException, match="cut before its end"):
        await mills.ainvoke("Which mill?")
    with pytest.raises(OutputParserException, match="cut before its end"):
        list(mills.stream("Which mill?"))
    output = cut.with_structured_output(Mill, include_raw=True).invoke("Which mill?")
    assert output["raw"].text == '{"name": "Arden", "year"'
    assert output["parsed"] is None
    assert isinstance(output["parsing_error"], OutputParserException)


def test_a_stream_gives_the_object_as_it_grows(llm: ChatSpecCache) -> None:
    assert list(llm.with_structured_output(MillDict).stream("Which mill?")) == [{}, {"name": "Arden"}, AS_DICT]


def test_traces_name_the_schema(llm: ChatSpecCache) -> None:
    class Options(BaseCallbackHandler):
        seen: list[Any] = []

        def on_chat_model_start(self, *_: Any, options: Any = None, **__: Any) -> None:
            self.seen.append(options["ls_structured_output_format"])

    handler = Options()
    llm.with_structured_output(Mill).invoke("Which mill?", {"callbacks": [handler]})
    assert handler.seen == [{"kwargs": {"method": "json_schema"}, "schema": convert_to_json_schema(Mill)}]


def test_an_engine_that_cannot_guide_says_so(tiny_folder: Path) -> None:
    options = {"device": "cpu", "dtype": "float32"}
    with SpecCache(
        model=str(tiny_folder), engine="transformers", policy="full_reuse", engine_options=options
    ) as running:
        mills = ChatSpecCache(runtime=running).with_structured_output(Mill)
        with pytest.raises(ConfigurationError, match="'structured_outputs'.*Transformers engine"):
            mills.invoke("Which mill?")
