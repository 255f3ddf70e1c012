"""The options every command shares, made from the fields of `SpecCacheConfig`, so that each is written once."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from speccache_rag.config import SpecCacheConfig, read_options
from speccache_rag.errors import ConfigurationError

DEFAULT_STORE = "~/.cache/speccache/chunks"
"""Commands end, and chunk KV in RAM with them: the command line keeps it on disk."""

FLAGS = {
    "model": ("--model", "--target"),
    "speculative_model": ("--speculative", "--speculative-model"),
    "policy_options": ("--policy-option",),
    "chat_template_kwargs": ("--chat-template-kwarg",),
    "engine_options": ("--engine-option",),
}
"""Where the flag is not simply the name of the field."""

Options = dict[str, Any]
"""What was given on the command line, by field of `SpecCacheConfig`; what was not is absent."""

Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, help="Write what is printed to FILE."),
]


CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="TOML file with options, as `speccache tune` writes it; flags go before it.",
            show_default=False,
            rich_help_panel="Configuration",
        ),
    ],
)


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `SpecCacheConfig`; it receives them as its first argument, `options`."""
    shared = [_parameter(name, field) for name, field in SpecCacheConfig.model_fields.items()]
    names = {parameter.name for parameter in shared}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        file = arguments.pop("config")
        kept = {} if file is None else read_options(file)
        command({**kept, **_parsed(given)}, **arguments)

    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()][1:]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, CONFIG, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def stored_config(options: Options) -> SpecCacheConfig:
    """The configuration that was given, with chunk KV on disk."""
    return SpecCacheConfig.build(**{"store": os.path.expanduser(DEFAULT_STORE), **options})


def write_json(path: Path | None, value: Any) -> None:
    """Write `value` to the file given as `--json`, if one was."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A command-line option for a field. Values stay strings: `SpecCacheConfig` alone parses and checks them."""
    flags = FLAGS.get(name, (f"--{name.replace('_', '-')}",))
    shown = "" if field.is_required() or not field.default else f" Default: {field.default}."
    repeated = get_origin(field.annotation) is dict
    metavar = "KEY=VALUE" if repeated else "|".join(filter(_is_str, get_args(field.annotation))) or "VALUE"
    help_text = f"{field.description}{' Repeatable; VALUE is JSON or plain text.' if repeated else shown}"
    option = typer.Option(*flags, metavar=metavar, help=help_text, show_default=False, rich_help_panel="Configuration")
    kind = list[str] if repeated else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _parsed(given: Options) -> Options:
    """Drop what was not given, read KEY=VALUE lists, expand `~` in paths."""
    options: Options = {}
    for name, value in given.items():
        if isinstance(value, list):
            options |= {name: key_values(value, FLAGS[name][0])} if value else {}
        elif value is not None:
            options[name] = os.path.expanduser(value) if name in ("model", "speculative_model", "store") else value
    return options


def key_values(items: Sequence[str], flag: str) -> dict[str, Any]:
    """`["a=1", "b=text"]` as `{"a": 1, "b": "text"}`; a value that is no JSON is text.

    Raises:
        ConfigurationError: an item has no `=` or no key.
    """
    result = {}
    for item in items:
        key, mark, value = item.partition("=")
        if not (key and mark):
            raise ConfigurationError(f"{flag} {item!r} is not KEY=VALUE.", hint=f"Write {flag} max_model_len=4096.")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = value
    return result
