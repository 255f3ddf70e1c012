"""Policy expressions: a policy with its options in one line, behind wrappers, as `heads(4)+attended(layers=all)`.

    expression = term {"+" term}          every term but the last is a wrapper around what follows
    term = name ["(" argument {"," argument} ")"]
    argument = value | field "=" value    values are JSON, or plain text; those without a field come first

A value has no comma, bracket or plus in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from speccache_rag.errors import ConfigurationError

_TERM = re.compile(r"\s*(?P<name>[\w.:-]+)\s*(?:\((?P<arguments>[^()]*)\))?\s*")


@dataclass(frozen=True, slots=True)
class Term:
    """One policy of an expression."""

    name: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


def parse_expression(text: str) -> list[Term]:
    """The terms of an expression, outermost first.

    Raises:
        ConfigurationError: it is no expression; the message shows the term that is none.
    """
    return [_term(text, part) for part in text.split("+")]


def _term(text: str, part: str) -> Term:
    found = _TERM.fullmatch(part)
    if found is None:
        raise ConfigurationError(
            f"{part.strip()!r} in policy {text!r} is no policy.", hint="Write a name, or heads(4)+attended(layers=all)."
        )
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in filter(None, (item.strip() for item in (found["arguments"] or "").split(","))):
        field, mark, value = argument.partition("=")
        if mark:
            named[field.strip()] = _value(value)
        elif named:
            raise ConfigurationError(f"{argument!r} in policy {text!r} stands behind an option with a name.", hint="")
        else:
            positional.append(_value(argument))
    return Term(found["name"], tuple(positional), named)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
