"""`SpecCacheLLM`: the LLM of a LlamaIndex pipeline, with KV reuse behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.types import PydanticProgramMode
from llama_index.core.utils import get_tokenizer
from llama_index.llms.speccache.counting import SAMPLE, window_in_llama_index_tokens
from llama_index.llms.speccache.rendering import HasText, as_turns, bare_texts
from llama_index.llms.speccache.responses import Answers, chat_response, completion_response
from llama_index.llms.speccache.structured import GuidedLLM
from llama_index.llms.speccache.tools import ToolCallingLLM

from speccache_rag.config import SpecCacheConfig, configuration_errors
from speccache_rag.errors import ConfigurationError
from speccache_rag.prompt.templates import ChatTemplate, Turn
from speccache_rag.runtime import SpecCache
from speccache_rag.spellings import OF_SERVICES, ConstructorOptions, canonical
from speccache_rag.types import WarmReport

OWN = ("temperature", "max_tokens", "stop", "top_p", "seed", "timeout")
"""Options of calls that are fields; a constructor takes them beside the fields of `SpecCacheConfig`."""


class SpecCacheLLM(ToolCallingLLM, GuidedLLM):
    """An LLM that reuses the KV of chunks it knows, wherever they stand in the prompt.

    The pipeline around it stays as it is: chunks are found in the rendered prompt.

        llm = SpecCacheLLM(model="Qwen/Qwen2.5-1.5B-Instruct", speculative_model="HuggingFaceTB/SmolLM2-135M-Instruct")
        llm.warm(nodes)
        index.as_query_engine(llm=llm).query("...")

    Options of `SpecCacheConfig` are given by name; or give a whole `config`, or its TOML file, or a live `runtime`. The
    engine starts when it is first needed and is shared by all copies in the process, deep and unpickled ones too.
    The final response holds `raw["usage"]` and `raw["speccache"]`, the prefill report, which a `SpecCacheReuseEvent`
    on LlamaIndex's dispatcher carries too. Where the model's chat template knows tools, `FunctionAgent` works; what a
    model thinks before it answers stands in a ThinkingBlock.

    Raises:
        ConfigurationError: an option is unknown or out of range, or options come from two sources.
    """

    # Not in repr, which ends in logs: engine options may hold an access token.
    config: SpecCacheConfig = Field(repr=False, description="What the engine is built from.")
    temperature: float | None = Field(default=0.0, ge=0.0, description="0, and None, take the likeliest token.")
    max_tokens: int | None = Field(default=None, gt=0, description="Most tokens in an answer; None: what fits.")
    stop: list[str] | None = Field(default=None, description="Texts that end an answer.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Draw from the likeliest tokens only.")
    seed: int | None = Field(default=None, description="The same seed gives the same answer.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds an answer may take; then RequestTimeout.")
    pydantic_program_mode: PydanticProgramMode = Field(
        default=PydanticProgramMode.LLM,
        description="How objects are asked for: by their schema (LLM), or as arguments of a tool (FUNCTION).",
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed with every call: sampling parameters, policy, recompute_ratio, scoring.",
    )
    _runtime: SpecCache | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | None = None,
        *,
        config: SpecCacheConfig | Mapping[str, Any] | str | Path | None = None,
        runtime: SpecCache | None = None,
        **options: Any,
    ) -> None:
        fields = type(self).model_fields
        given = ConstructorOptions.of({**options, **({} if model is None else {"model": model})}, fields)
        chosen = SpecCacheConfig.from_one_source(
            given.config,
            config,
            None if runtime is None else runtime.config,
            hint=f"SpecCacheLLM itself takes {', '.join(OWN)} and LlamaIndex's own; other sampling options go into "
            "additional_kwargs={...}, with_options(...) or the call.",
        )
        with configuration_errors(type(self)):
            super().__init__(config=chosen, **given.own)
        self.additional_kwargs = {**given.calls, **self.additional_kwargs}
        self._runtime = runtime

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes it."""
        return "SpecCacheLLM"

    @property
    def runtime(self) -> SpecCache:
        """The object that answers: the one given, else the process's own for this configuration."""
        return self._runtime or SpecCache.shared(self.config)

    @property
    def metadata(self) -> LLMMetadata:
        """Facts that pipelines ask for. The context window is the engine's own, so asking starts the engine.

        It is given in LlamaIndex's own tokens, for that is what prompts are packed by (`counting`).
        """
        runtime = self.runtime
        known = runtime.some_chunks(SAMPLE)
        return LLMMetadata(
            context_window=window_in_llama_index_tokens(runtime.max_model_len, known, get_tokenizer()),
            num_output=self.max_tokens or min(DEFAULT_NUM_OUTPUTS, runtime.max_model_len // 4),
            is_chat_model=self._is_chat,
            is_function_calling_model=ChatTemplate(runtime.tokenizer).knows_tools,
            model_name=self.config.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """What the start event of every call says. LlamaIndex's own asks for `metadata`, on the event loop too."""
        own = {"temperature": self.temperature, "num_output": self.max_tokens}
        return {"class_name": self.class_name(), "model_name": self.config.model, **own}

    def with_options(self, **options: Any) -> SpecCacheLLM:
        """A copy on the same engine whose calls differ: `temperature`, `max_tokens`, `stop`, `policy`, `scoring`, ...

        Query engines pass no arguments to the LLM, so this is how one pipeline gets other ones.
        """
        given = canonical(options)
        fields: dict[str, Any] = {name: given.pop(name) for name in OWN if name in given}
        return self.model_copy(update={**fields, "additional_kwargs": {**self.additional_kwargs, **given}})

    def warm(self, chunks: Iterable[HasText], *, show_progress: bool = True) -> WarmReport:
        """Compute and store the KV of nodes or texts; what is stored already is skipped.

        Texts that cannot be chunks (blank, longer than the context) are skipped too, and named in the report and a
        warning.

        Raises:
            StoreError: the KV cannot be written.
        """
        return self.runtime.warm(bare_texts(chunks), show_progress=show_progress, skip_bad=True)

    def prefetch(self, chunks: Iterable[HasText]) -> None:
        """Prefetch the KV of nodes or texts that a prompt will soon hold; new ones become known. Never waits."""
        self.runtime.prefetch(bare_texts(chunks))

    # Chat and completion, each whole, streamed, and both again for asyncio. Making a prompt may load the tokenizer, and
    # no event loop should wait for that.

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chats.whole(self.runtime.generate(self._turns(messages), **self._params(kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        request = await asyncio.to_thread(self._turns, messages)
        return self._chats.whole(await self.runtime.agenerate(request, **self._params(kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chats.stream(self.runtime.stream(self._turns(messages), **self._params(kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        request = await asyncio.to_thread(self._turns, messages)
        return self._chats.astream(self.runtime.astream(request, **self._params(kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        request = self._prompt(prompt, formatted)
        return self._completions.whole(self.runtime.generate(request, **self._params(kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        request = await asyncio.to_thread(self._prompt, prompt, formatted)
        return self._completions.whole(await self.runtime.agenerate(request, **self._params(kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        request = self._prompt(prompt, formatted)
        return self._completions.stream(self.runtime.stream(request, **self._params(kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        request = await asyncio.to_thread(self._prompt, prompt, formatted)
        return self._completions.astream(self.runtime.astream(request, **self._params(kwargs)))

    @property
    def guides_decoding(self) -> bool:
        """Whether the engine holds an answer to a JSON schema: vLLM does.

        In other modes an object comes out of a tool call, which no schema may stand in the way of.
        """
        return self.config.engine == "vllm" and self.pydantic_program_mode == PydanticProgramMode.LLM

    @property
    def _chats(self) -> Answers[ChatResponse]:
        return Answers(chat_response, self.config.model, self.runtime)

    @property
    def _completions(self) -> Answers[CompletionResponse]:
        return Answers(completion_response, self.config.model, self.runtime)

    @property
    def _is_chat(self) -> bool:
        return bool(self.runtime.tokenizer.chat_template)

    def _turns(self, messages: Sequence[ChatMessage]) -> str | list[Turn]:
        """Turns for the chat template; a model without one gets the text that `messages_to_prompt` makes of them."""
        turns = as_turns(messages)  # also refuses what is not text
        if self._is_chat:
            return turns
        assert self.messages_to_prompt is not None  # LlamaIndex's validator puts its own
        return self.messages_to_prompt(messages)

    def _prompt(self, prompt: str, formatted: bool) -> str | list[Turn]:
        """A formatted prompt goes in as it is; a bare instruction becomes one user turn."""
        if formatted:
            return prompt
        if self._is_chat:
            return [{"role": "user", "content": prompt}]
        assert self.completion_to_prompt is not None  # LlamaIndex's validator puts its own
        return self.completion_to_prompt(prompt)

    def _params(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of one call: the fields, then `additional_kwargs`, then the call's own.

        None means not given: frameworks pass `stop=None` along, which must not undo the configured one; `[]` does.

        Raises:
            ConfigurationError: the call asks for several answers.
        """
        own = {name: getattr(self, name) for name in OWN}
        own["temperature"] = self.temperature or 0.0
        sources = (own, canonical(self.additional_kwargs), canonical(kwargs))
        params = {name: value for source in sources for name, value in source.items() if value is not None}
        for name in OF_SERVICES:
            params.pop(name, None)
        if (n := params.pop("n", 1)) != 1:
            raise ConfigurationError(f"n is {n!r}; SpecCacheLLM gives one answer a call.", hint="Call it n times.")
        return params
