"""The selection policy of an expression and plain options, as configuration files and flags give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from speccache_rag.errors import ConfigurationError, refuse_unknown
from speccache_rag.registry import Registry
from speccache_rag.selection import POLICIES, WRAPPERS
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.selection.expression import Term, parse_expression
from speccache_rag.selection.wrapper import Wrapper


def build_policy(name: str, options: Mapping[str, Any] | None = None) -> SelectionPolicy:
    """The selection policy of an expression, such as "epic" or "heads(4)+attended(scorer=target)".

    Args:
        name: the expression (selection/expression.py): a policy, behind any number of wrappers.
        options: fields of the policy's dataclass.

    Raises:
        ConfigurationError: a name or an option is unknown, or an option is out of range.
    """
    *wrappers, last = parse_expression(name)
    policy = _made(_class_of(last.name, POLICIES, SelectionPolicy), last, options or {})
    for term in reversed(wrappers):
        policy = _made(_class_of(term.name, WRAPPERS, Wrapper), term, {}, inner=policy)
    return policy


def _made(
    policy_class: type[SelectionPolicy], term: Term, options: Mapping[str, Any], **inner: SelectionPolicy
) -> SelectionPolicy:
    known = [field.name for field in dataclasses.fields(policy_class) if field.name not in inner]
    if len(term.positional) > len(known):
        raise ConfigurationError(
            f"Policy {term.name!r} has {len(known)} options, and {len(term.positional)} values.",
            hint=f"Known: {', '.join(known) or 'none'}.",
        )
    given = dict(zip(known, term.positional, strict=False))
    for more in (term.named, options):
        if repeated := sorted(set(given) & set(more)):
            raise ConfigurationError(f"Policy {term.name!r} is given {', '.join(repeated)} twice.", hint="")
        given |= more
    refuse_unknown(f"policy {term.name!r}", given, known)
    try:
        return policy_class(**given, **inner)
    except TypeError as error:
        raise ConfigurationError(f"Policy {term.name!r} cannot be made: {error}.", hint="") from error


def _class_of(name: str, registry: Registry, wanted: type) -> type[SelectionPolicy]:
    found: Any = registry.load(name)
    fits = isinstance(found, type) and issubclass(found, wanted)
    if not fits:
        raise ConfigurationError(
            f"{registry.kind.capitalize()} {name!r} is {found!r}, which is no {wanted.__name__}.",
            hint=f"Let the entry point name a subclass of {wanted.__module__}.{wanted.__name__}.",
        )
    policy_class: type[SelectionPolicy] = found
    return policy_class
