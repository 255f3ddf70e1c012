"""Names to classes, imported when first asked for, open to entry points and to import paths."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from speccache_rag.errors import ConfigurationError


class Registry:
    """A table `name -> "module:attribute"`, completed by an entry-point group.

    Nothing is imported before `load` asks for it, so a name whose class needs a heavy or missing package costs
    nothing until it is used.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], entry_point_group: str | None = None) -> None:
        self.kind = kind
        self._builtin = dict(builtin)
        self._group = entry_point_group

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._builtin, *self._third_party()})

    def load(self, name: str) -> Any:
        """The object behind `name`, which may also be an import path "module:attribute".

        Raises:
            ConfigurationError: the name is unknown, and the message lists the known ones; or nothing is at that path.
        """
        if name in self._builtin:
            return _at(self._builtin[name])
        third_party = self._third_party()
        if name in third_party:
            return third_party[name].load()
        if ":" in name:
            try:
                return _at(name)
            except Exception as error:  # whatever the user's module does when it is imported
                raise ConfigurationError(
                    f"{self.kind.capitalize()} {name!r} cannot be imported: {error}.", hint="Write module:attribute."
                ) from error
        raise ConfigurationError(f"Unknown {self.kind} {name!r}.", hint=f"Known: {', '.join(self.names())}.")

    def _third_party(self) -> dict[str, Any]:
        return {e.name: e for e in entry_points(group=self._group)} if self._group else {}


def _at(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
