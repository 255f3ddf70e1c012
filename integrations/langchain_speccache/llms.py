"""`SpecCacheCompletion`: prompts as text, for base models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import GenerationChunk, LLMResult

from langchain_speccache.base import SpecCacheModel
from langchain_speccache.batches import acomplete, complete, one_answer
from langchain_speccache.responses import PROVIDER
from speccache_rag.types import Completion


class SpecCacheCompletion(SpecCacheModel, BaseLLM):
    """A completion model that reuses the KV of chunks it knows. Prompts go in as they are, without a chat template.

    For base models; `ChatSpecCache` serves instruction-tuned ones. Options and calls are the same. A generation's
    `generation_info` holds "usage" and "speccache", the prefill report.

    Raises:
        ConfigurationError: an option is unknown or out of range, or options come from two sources.
    """

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result(complete(self.runtime, prompts, self._params(stop, kwargs)))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._result(await acomplete(self.runtime, prompts, self._params(stop, kwargs)))

    def _result(self, completions: list[list[Completion]]) -> LLMResult:
        return LLMResult(generations=[[self._answers.generation(one) for one in several] for several in completions])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        params, answers = one_answer(self._params(stop, kwargs)), self._answers
        with closing(self.runtime.stream(prompt, **params)) as deltas:
            for delta in deltas:
                yield answers.generation_chunk(delta)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        params, answers = one_answer(self._params(stop, kwargs)), self._answers
        async with aclosing(self.runtime.astream(prompt, **params)) as deltas:
            async for delta in deltas:
                yield answers.generation_chunk(delta)

    @property
    def _llm_type(self) -> str:
        return "speccache"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)
        return {**params, "ls_provider": PROVIDER}
