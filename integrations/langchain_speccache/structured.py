"""Answers that follow a schema: vLLM decodes under its grammar, LangChain's parsers read the result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured_output(
    llm: BaseChatModel, schema: dict[str, Any] | type, *, include_raw: bool, method: Method, **kwargs: Any
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """See `ChatSpecCache.with_structured_output`.

    Raises:
        ValueError: the method is unknown, or the schema is of no kind that LangChain converts.
        OutputParserException: when run, if an answer was cut short or does not parse.
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; known: {', '.join(get_args(Method))}.")
    json_schema = convert_to_json_schema(schema)
    bound = llm.bind(
        structured_outputs={"json_object": True} if method == "json_mode" else {"json": json_schema},
        ls_structured_output_format={"kwargs": {"method": method}, "schema": json_schema},
        **kwargs,
    )
    parser = RunnableGenerator(_uncut, _auncut) | _parser(schema)
    if not include_raw:
        return bound | parser
    # As LangChain's own: what could not be parsed is given too, beside the error.
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _parser(schema: dict[str, Any] | type) -> Runnable[Any, Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def _uncut(messages: Iterator[AIMessage]) -> Iterator[AIMessage]:
    """Pass messages on, and refuse an answer that `max_tokens` cut: LangChain's parsers would mend it unasked.

    Raises:
        OutputParserException: it was cut.
    """
    for message in messages:
        yield message
        _refuse_cut(message)


async def _auncut(messages: AsyncIterator[AIMessage]) -> AsyncIterator[AIMessage]:
    async for message in messages:
        yield message
        _refuse_cut(message)


def _refuse_cut(message: AIMessage) -> None:
    if message.response_metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "The answer was cut before its end, at max_tokens. Raise it: with_structured_output(..., max_tokens=...).",
            llm_output=message.text,
        )
