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
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.llms.speccache.rendering import HasText, as_turns, bare_texts
from llama_index.llms.speccache.responses import Answers, chat_response, completion_response
from llama_index.llms.speccache.structured import GuidedLLM

from speccache_rag.config import SpecCacheConfig
from speccache_rag.runtime import SpecCache
from speccache_rag.types import WarmReport


class SpecCacheLLM(GuidedLLM):
    """An LLM that reuses the KV of chunks it knows, wherever they stand in the prompt.

    The pipeline around it stays as it is: chunks are found in the rendered prompt.

        llm = SpecCacheLLM(model="Qwen/Qwen2.5-1.5B-Instruct", speculative_model="HuggingFaceTB/SmolLM2-135M-Instruct")
        llm.warm(nodes)
        index.as_query_engine(llm=llm).query("...")

    Options of `SpecCacheConfig` are given by name; or give a whole `config`, or its TOML file, or a live `runtime`. The
    engine starts when it is first needed and is shared by all copies in the process, deep and unpickled ones too.
    The final response holds `raw["usage"]` and `raw["speccache"]`, the prefill report, which a `SpecCacheReuseEvent`
    on LlamaIndex's dispatcher carries too. Agents that need function calling refuse it; `ReActAgent` does not.

    Raises:
        ConfigurationError: an option is unknown or out of range, or options come from two sources.
    """

    # Not in repr, which ends in logs: engine options may hold an access token.
    config: SpecCacheConfig = Field(repr=False, description="What the engine is built from.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 takes the likeliest token.")
    max_tokens: int = Field(default=256, gt=0, description="Most tokens in an answer.")
    stop: list[str] | None = Field(default=None, description="Texts that end an answer.")
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
        own = {name: options.pop(name) for name in type(self).model_fields if name in options}
        if model is not None:
            options["model"] = model
        live = None if runtime is None else runtime.config
        chosen = SpecCacheConfig.from_one_source(
            options, config, live, owner="SpecCacheLLM", owner_options=type(self).model_fields
        )
        super().__init__(config=chosen, **own)
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
        """Facts that pipelines ask for. The context window is the engine's own, so asking starts the engine."""
        runtime = self.runtime
        return LLMMetadata(
            context_window=runtime.max_model_len,
            num_output=self.max_tokens,
            is_chat_model=self._is_chat,
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
        fields: dict[str, Any] = {
            name: options.pop(name) for name in ("temperature", "max_tokens", "stop") if name in options
        }
        return self.model_copy(update={**fields, "additional_kwargs": {**self.additional_kwargs, **options}})

    def warm(self, chunks: Iterable[HasText], *, show_progress: bool = True) -> WarmReport:
        """Compute and store the KV of nodes or texts; what is stored already is skipped.

        Raises:
            PromptError: a text is empty or longer than the context.
            StoreError: the KV cannot be written.
        """
        return self.runtime.warm(bare_texts(chunks), show_progress=show_progress)

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

        A subclass that calls tools gets its objects out of tool calls, which no schema may stand in the way of.
        """
        return self.config.engine == "vllm" and not self.metadata.is_function_calling_model

    @property
    def _chats(self) -> Answers[ChatResponse]:
        return Answers(chat_response, self.config.model, self.runtime)

    @property
    def _completions(self) -> Answers[CompletionResponse]:
        return Answers(completion_response, self.config.model, self.runtime)

    @property
    def _is_chat(self) -> bool:
        return bool(self.runtime.tokenizer.chat_template)

    def _turns(self, messages: Sequence[ChatMessage]) -> str | list[dict[str, str]]:
        """Turns for the chat template; a model without one gets the text that `messages_to_prompt` makes of them."""
        turns = as_turns(messages)  # also refuses what is not text
        if self._is_chat:
            return turns
        assert self.messages_to_prompt is not None  # LlamaIndex's validator puts its own
        return self.messages_to_prompt(messages)

    def _prompt(self, prompt: str, formatted: bool) -> str | list[dict[str, str]]:
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
        """
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop": self.stop}
        sources: tuple[Mapping[str, Any], ...] = (own, self.additional_kwargs, kwargs)
        return {name: value for source in sources for name, value in source.items() if value is not None}
