"""Structured output: the engine may only generate what parses, where it can hold itself to a schema."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import Model

if TYPE_CHECKING:
    from llama_index.core.program.utils import FlexibleModel

Kwargs = dict[str, Any]


class GuidedLLM(LLM):
    """An LLM whose structured predictions carry the JSON schema to the engine.

    LlamaIndex's text program stays in charge: it puts the schema into the prompt and parses the answer. All ways to a
    structured answer (`structured_predict`, `as_structured_llm`, `output_cls` of a query engine) end in these four.
    """

    @property
    @abstractmethod
    def guides_decoding(self) -> bool:
        """Whether the engine takes `structured_outputs`; without, the prompt alone asks for the schema."""

    def structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Kwargs | None = None, **prompt_args: Any
    ) -> Model:
        """An object of `output_cls` (see `LLM.structured_predict`)."""
        guided = self._guided(output_cls, llm_kwargs)
        answer: Model = super().structured_predict(output_cls, prompt, guided, **prompt_args)
        return answer

    async def astructured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Kwargs | None = None, **prompt_args: Any
    ) -> Model:
        """`structured_predict` for an event loop."""
        guided = await asyncio.to_thread(self._guided, output_cls, llm_kwargs)  # may start the engine
        answer: Model = await super().astructured_predict(output_cls, prompt, guided, **prompt_args)
        return answer

    def stream_structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Kwargs | None = None, **prompt_args: Any
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Partial objects while the answer grows (see `LLM.stream_structured_predict`)."""
        guided = self._guided(output_cls, llm_kwargs)
        return super().stream_structured_predict(output_cls, prompt, guided, **prompt_args)

    async def astream_structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: Kwargs | None = None, **prompt_args: Any
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        """`stream_structured_predict` for an event loop."""
        guided = await asyncio.to_thread(self._guided, output_cls, llm_kwargs)
        return await super().astream_structured_predict(output_cls, prompt, guided, **prompt_args)

    def _guided(self, output_cls: type[BaseModel], llm_kwargs: Mapping[str, Any] | None) -> Kwargs:
        """The call's arguments with the schema in them; a call's own `structured_outputs` wins."""
        _ = self.metadata  # may start the engine; LlamaIndex would ask for it on the event loop
        if not self.guides_decoding:
            return dict(llm_kwargs or {})
        return {"structured_outputs": {"json": output_cls.model_json_schema()}, **(llm_kwargs or {})}
