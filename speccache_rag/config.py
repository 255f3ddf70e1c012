"""Every option, written once. Constructors, the CLI and vLLM's extra config all go through `SpecCacheConfig`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tomllib
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from speccache_rag.errors import ConfigurationError

Scoring = Literal["online", "cached"]
KvDtype = Literal["auto", "fp8", "int8"]
Admission = Literal["warm", "first", "second"]


class SpecCacheConfig(BaseModel):
    """Options of `SpecCache`. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Target model: a local folder or a hub id.")
    speculative_model: str | None = Field(
        default=None,
        description="Small model that scores tokens, for the policies that ask one: a local folder or a hub id.",
    )
    speculative_device: str = Field(
        default="cpu", description="Where importance is scored: 'cpu', 'cuda', 'cuda:1', 'mps'."
    )
    engine: str = Field(default="vllm", description="Inference engine.")
    policy: str = Field(default="epic", description="Selection policy: which chunk tokens to recompute.")
    policy_options: dict[str, Any] = Field(default_factory=dict, description="Fields of the policy's dataclass.")
    scoring: Scoring = Field(
        default="cached",
        description="'cached' scores each chunk alone at warm time; 'online' scores every prompt (the paper).",
    )
    recompute_ratio: float = Field(default=0.15, ge=0.0, le=1.0, description="Fraction of chunk tokens recomputed.")
    min_reuse_tokens: int = Field(
        default=32,
        ge=1,
        description="Shorter runs of a chunk's tokens are computed with the text around them, not loaded.",
    )
    store: str | None = Field(
        default=None,
        description="Folder that keeps chunk KV between runs, behind the RAM tier; None keeps it in RAM only.",
    )
    ram_bytes: int = Field(default=2 << 30, gt=0, description="Limit of the RAM tier, in bytes; each model has one.")
    disk_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Budget of the store folder's chunk KV, in bytes; None leaves a tenth of the filesystem free.",
    )
    kv_dtype: KvDtype = Field(
        default="auto",
        description="How KV is stored: 'auto' keeps every bit; 'fp8' and 'int8' take half of bfloat16's bytes.",
    )
    store_secret_file: str | None = Field(
        default=None,
        description="File with a secret that keys the checksums: who does not know it cannot plant KV in the store.",
    )
    admission: Admission = Field(
        default="second",
        description="Which miss of a chunk has its KV captured: the 'first', the 'second', or none ('warm').",
    )
    tenant: str | None = Field(default=None, description="Chunks of one tenant are invisible to every other.")
    anchor: str | None = Field(
        default=None,
        description="Text in front of a chunk while it is captured; None takes the chat template's own header.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables for the chat template, such as enable_thinking."
    )
    tool_parser: str | None = Field(
        default=None, description="vLLM's parser of tool calls, by name; None tells it from the chat template."
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="vLLM's parser of reasoning, by name, or 'none'; None tells it from the chat template.",
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the engine (vLLM: AsyncEngineArgs by name)."
    )

    @field_validator("model", "speculative_model", "store", mode="before")
    @classmethod
    def _paths_are_strings(cls, value: Any) -> Any:
        return str(value.expanduser()) if isinstance(value, Path) else value

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the model name is empty")
        return value

    @classmethod
    def build(cls, **options: Any) -> SpecCacheConfig:
        """`SpecCacheConfig(**options)`, with errors of this package.

        Raises:
            ConfigurationError: an option is unknown or out of range; the message names each value and its limit.
        """
        with configuration_errors(cls):
            return cls(**options)

    @classmethod
    def load(cls, path: str | Path) -> SpecCacheConfig:
        """The configuration in a TOML file, as `speccache tune` writes it: fields by name.

        Raises:
            ConfigurationError: the file cannot be read, or an option in it is unknown or out of range.
        """
        return cls.build(**read_options(path))

    def to_toml(self) -> str:
        """The options that are not their defaults, as a TOML file holds them."""
        given = {name: value for name, value in self.model_dump(exclude_defaults=True).items() if value is not None}
        return "".join(f"{name} = {_toml(value)}\n" for name, value in given.items())

    @classmethod
    def from_one_source(
        cls,
        options: Mapping[str, Any],
        config: SpecCacheConfig | Mapping[str, Any] | str | Path | None,
        live: SpecCacheConfig | None,
        *,
        hint: str,
    ) -> SpecCacheConfig:
        """The configuration of a front end, which takes it in one of three ways.

        Args:
            options: fields by name.
            config: a whole configuration, or the TOML file that holds it.
            live: the configuration of a live runtime.
            hint: where the front end takes options of other kinds, for the error message.

        Raises:
            ConfigurationError: options come from two sources, or one of them is unknown or out of range.
        """
        # Named, not shown: engine options may hold an access token.
        given = {"config=": config is not None, "runtime=": live is not None, f"by name {sorted(options)}": options}
        if len(sources := [name for name, there in given.items() if there]) > 1:
            raise ConfigurationError(
                f"Options come from {len(sources)} sources: {', '.join(sources)}.",
                hint="Give options by name, or config=, or runtime=.",
            )
        if live is not None:
            return live
        if isinstance(config, SpecCacheConfig):
            return config
        if isinstance(config, str | Path):
            return cls.load(config)
        try:
            return cls.build(**(config or options))
        except ConfigurationError as error:
            raise ConfigurationError(error.message, hint=hint) from error


@contextmanager
def configuration_errors(model: type[BaseModel]) -> Iterator[None]:
    """Pydantic's errors about the fields of `model` as ours.

    Raises:
        ConfigurationError: the message names each bad field, its value and its limit.
    """
    try:
        yield
    except ValidationError as error:
        raise ConfigurationError(_describe(error, model)) from error


def read_options(path: str | Path) -> dict[str, Any]:
    """The options in a TOML file, unchecked.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The configuration file {str(path)!r} cannot be read: {error}.", hint="Make one with `speccache tune`."
        ) from error


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One clause per bad option: its name, its value, what is wrong with it."""
    clauses = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            clauses.append(f"unknown option {name!r} (known: {', '.join(model.model_fields)})")
        elif item["type"] == "missing":
            clauses.append(f"option {name!r} is missing")
        else:
            clauses.append(f"option {name!r} is {item['input']!r}: {item['msg']}")
    return "Bad configuration: " + "; ".join(clauses) + "."
