"""The selection policy of a name and plain options, as configuration files and flags give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from speccache_rag.errors import ConfigurationError, refuse_unknown
from speccache_rag.selection import POLICIES
from speccache_rag.selection.base import SelectionPolicy


def build_policy(name: str, options: Mapping[str, Any] | None = None) -> SelectionPolicy:
    """The selection policy called `name`; `options` are the fields of its dataclass.

    Raises:
        ConfigurationError: the name or an option is unknown, or an option is out of range.
    """
    policy_class = POLICIES.load(name)
    if not (isinstance(policy_class, type) and issubclass(policy_class, SelectionPolicy)):
        raise ConfigurationError(
            f"Policy {name!r} is {policy_class!r}, which is no SelectionPolicy.",
            hint="Let the entry point name a subclass of speccache_rag.selection.base.SelectionPolicy.",
        )
    options = options or {}
    refuse_unknown(f"policy {name!r}", options, [field.name for field in dataclasses.fields(policy_class)])
    try:
        return policy_class(**options)
    except TypeError as error:
        raise ConfigurationError(f"Policy {name!r} cannot be made: {error}.", hint="") from error
