"""`ChatSpecCache`: the chat model of a LangChain pipeline, with KV reuse behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from langchain_speccache.base import SpecCacheModel
from langchain_speccache.batches import acomplete, complete, one_answer
from langchain_speccache.messages import as_turns
from langchain_speccache.responses import PROVIDER
from langchain_speccache.structured import Method, structured_output


class ChatSpecCache(SpecCacheModel, BaseChatModel):
    """A chat model that reuses the KV of chunks it knows, wherever they stand in the prompt.

    The chain around it stays as it is: chunks are found in the rendered prompt.

        llm = ChatSpecCache(model="Qwen/Qwen2.5-1.5B-Instruct", speculative_model="HuggingFaceTB/SmolLM2-135M-Instruct")
        llm.warm(documents)
        ({"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm).invoke("...")

    Options of `SpecCacheConfig` are given by name; or give a whole `config`, or a live `runtime`. A call, `bind` and
    `model_kwargs` take vLLM's `SamplingParams` by name (`top_p`, `seed`, `logprobs`, ...) and `policy`,
    `recompute_ratio`, `scoring`. An answer's `usage_metadata` counts reused tokens as `cache_read`; its
    `response_metadata["speccache"]` is the prefill report.

    Raises:
        ConfigurationError: an option is unknown or out of range, or options come from two sources.
    """

    streaming: bool | None = Field(default=None, description="LangChain's switch: True streams behind `invoke` too.")

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model, told of tools: it may answer with calls of them, in `message.tool_calls`.

        Args:
            tools: whatever LangChain converts to a tool.
            tool_choice: "auto"; "none"; "any", "required" or True: it must call one; a tool's name: that one. A forced
                call is decoded under a grammar, on the vLLM engine.
            strict: taken for LangChain's sake.
            parallel_tool_calls: False takes one call of an answer only.
            **kwargs: bound to every call.

        Raises:
            ConfigurationError: when run, if the choice names no tool, or nothing reads this model's tool calls.
            PromptError: when run, if its chat template does not know tools.
        """
        options = {"tool_choice": _choice(tool_choice), "parallel_tool_calls": parallel_tool_calls}
        given = {name: value for name, value in options.items() if value is not None}
        return self.bind(tools=[convert_to_openai_tool(tool, strict=strict) for tool in tools], **given, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Method = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """This model, held to a schema by vLLM's guided decoding, with a parser behind it.

        Args:
            schema: a Pydantic class, a TypedDict, a JSON schema or a function schema.
            include_raw: give {"raw", "parsed", "parsing_error"} instead of what was parsed.
            method: "json_schema" and "function_calling" decode under the schema; "json_mode" under JSON's grammar only.
            strict: taken for LangChain's sake; decoding under a schema is always strict.
            **kwargs: bound to every call: `max_tokens`, `temperature`, `policy`, ...

        Raises:
            ValueError: the method is unknown, or the schema is of no kind that LangChain converts.
        """
        return structured_output(self, schema, include_raw=include_raw, method=method, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        [completions] = complete(self.runtime, [as_turns(messages)], self._params(stop, kwargs))
        return self._answers.chat_result(completions)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        [completions] = await acomplete(self.runtime, [as_turns(messages)], self._params(stop, kwargs))
        return self._answers.chat_result(completions)

    # LangChain itself tells callbacks of each chunk that these yield.

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        params, answers = one_answer(self._params(stop, kwargs)), self._answers
        with closing(self.runtime.stream(as_turns(messages), **params)) as deltas:  # leaving early frees the request
            for delta in deltas:
                yield answers.chat_chunk(delta)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        params, answers = one_answer(self._params(stop, kwargs)), self._answers
        async with aclosing(self.runtime.astream(as_turns(messages), **params)) as deltas:
            async for delta in deltas:
                yield answers.chat_chunk(delta)

    @property
    def _llm_type(self) -> str:
        return "speccache-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)
        return {**params, "ls_provider": PROVIDER}  # subclasses too


def _choice(choice: str | dict[str, Any] | bool | None) -> str | dict[str, Any] | None:
    """LangChain's ways to say that a tool must be called, as one."""
    if choice is True or choice == "any":
        return "required"
    return None if choice is False else choice
