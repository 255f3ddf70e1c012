"""What the chat model and the completion model share: options, the engine behind them, the arguments of a call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from langchain_speccache.responses import Answers
from speccache_rag.config import SpecCacheConfig, configuration_errors
from speccache_rag.errors import ConfigurationError
from speccache_rag.runtime import SpecCache
from speccache_rag.spellings import OF_SERVICES, ConstructorOptions, canonical
from speccache_rag.types import WarmReport

OWN = ("temperature", "max_tokens", "stop", "top_p", "seed", "n", "timeout", "model_kwargs", "streaming")
"""What a constructor takes beside the fields of `SpecCacheConfig`."""


SECRET = ("hf_token",)
"""Engine options that nobody may write down; without it, Hugging Face's own variable counts."""


class SpecCacheModel(BaseModel):
    """Options and engine of a LangChain model. Mixed into a LangChain base class, in front of it.

    Options of `SpecCacheConfig` are given by name; or give a whole `config`, or its TOML file, or a live `runtime`. The
    engine starts when it is first needed and is shared by all copies in the process, deep and unpickled ones too.

    Raises:
        ConfigurationError: an option is unknown or out of range, or options come from two sources.
    """

    model_config = ConfigDict(populate_by_name=True)

    # Not in repr: LangChain traces that, and engine options may hold an access token.
    config: SpecCacheConfig = Field(repr=False, description="What the engine is built from.")
    temperature: float | None = Field(default=0.0, ge=0.0, description="0, and None, take the likeliest token.")
    max_tokens: int | None = Field(default=None, gt=0, description="Most tokens in an answer; None: what fits.")
    stop: list[str] | None = Field(default=None, alias="stop_sequences", description="Texts that end an answer.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Draw from the likeliest tokens only.")
    seed: int | None = Field(default=None, description="The same seed gives the same answer.")
    n: int | None = Field(default=None, gt=0, description="Answers to each prompt.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds an answer may take; then RequestTimeout.")
    model_kwargs: dict[str, Any] = Field(
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
        fields, name = type(self).model_fields, type(self).__name__
        given = ConstructorOptions.of({**options, **({} if model is None else {"model": model})}, fields)
        chosen = SpecCacheConfig.from_one_source(
            given.config,
            config,
            None if runtime is None else runtime.config,
            hint=f"{name} itself takes {', '.join(n for n in OWN if n in fields)}; other sampling options go into "
            "model_kwargs={...}, bind(...) or the call.",
        )
        with configuration_errors(type(self)):
            super().__init__(config=chosen, **given.own)
        self.model_kwargs = {**given.calls, **self.model_kwargs}
        self._runtime = runtime

    @property
    def model(self) -> str:
        """The target model's name."""
        return self.config.model

    @property
    def runtime(self) -> SpecCache:
        """The object that answers: the one given, else the process's own for this configuration."""
        return self._runtime or SpecCache.shared(self.config)

    def warm(self, chunks: Iterable[Document | str], *, show_progress: bool = True) -> WarmReport:
        """Compute and store the KV of documents or texts; what is stored already is skipped.

        Texts that cannot be chunks (blank, longer than the context) are skipped too, and named in the report and a
        warning.

        Raises:
            StoreError: the KV cannot be written.
        """
        return self.runtime.warm(_texts(chunks), show_progress=show_progress, skip_bad=True)

    def prefetch(self, chunks: Iterable[Document | str]) -> None:
        """Prefetch the KV of documents or texts that a prompt will soon hold; new ones become known. Never waits."""
        self.runtime.prefetch(_texts(chunks))

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of the target model's tokenizer; LangChain's own default fetches GPT-2's."""
        return list(self.runtime.tokenizer.encode(text, add_special_tokens=False))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """LangChain may write it down: its options make it again, engine and all."""
        return True

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """As LangChain has it, with the configuration's fields by name. Access tokens are left out."""
        written: Any = super().to_json()  # type: ignore[misc]  # of the LangChain class that this is mixed into
        if written["type"] == "constructor":
            del written["kwargs"]["config"]
            written["kwargs"] |= self.config.model_dump(exclude_defaults=True)
            if options := written["kwargs"].get("engine_options"):
                written["kwargs"]["engine_options"] = {k: v for k, v in options.items() if k not in SECRET}
        found: SerializedConstructor | SerializedNotImplemented = written
        return found

    @property
    def _answers(self) -> Answers:
        return Answers(self.model, self.runtime)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: LangChain traces it, and finds answers in its cache by it."""
        shaping = self.config.model_dump(exclude={"store", "ram_bytes", "engine_options"})
        # Engine options hold the precision, and perhaps an access token: a digest tells them apart and shows none.
        engine_options = json.dumps(self.config.engine_options, sort_keys=True, default=str)
        digest = hashlib.sha256(engine_options.encode()).hexdigest()[:16]
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop_sequences": self.stop}
        own |= {"top_p": self.top_p, "seed": self.seed, "n": self.n}
        return {**shaping, "engine_options_digest": digest, **own, "model_kwargs": self.model_kwargs}

    def _params(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of one call: the fields, then `model_kwargs`, then the call's own. None means not given.

        Raises:
            ConfigurationError: the call asks for another model.
        """
        given = {name: value for name, value in canonical(kwargs).items() if value is not None}
        given.pop("stream", None)  # how LangChain forbids or demands streaming
        for name in OF_SERVICES:
            given.pop(name, None)
        asked = given.pop("model", self.model)
        if asked != self.model:
            raise ConfigurationError(
                f"The call asks for model {asked!r}; this {type(self).__name__} serves {self.model!r}.",
                hint=f"Make a second one: {type(self).__name__}(model={asked!r}, ...).",
            )
        own = {name: getattr(self, name) for name in ("max_tokens", "top_p", "seed", "n", "timeout")}
        own["temperature"] = self.temperature or 0.0
        own["stop"] = self.stop if stop is None else stop
        sources = (own, canonical(self.model_kwargs), {} if stop is None else {"stop": stop}, given)
        return {name: value for source in sources for name, value in source.items() if value is not None}


def _texts(chunks: Iterable[Document | str]) -> Iterable[str]:
    if isinstance(chunks, str):
        return chunks  # one text is not a list of letters: `SpecCache` refuses it
    return [chunk if isinstance(chunk, str) else chunk.page_content for chunk in chunks]
