"""Names to classes, imported when first asked for, open to entry points."""

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
        """The object behind `name`.

        Raises:
            ConfigurationError: the name is unknown; the message lists the known ones.
        """
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        third_party = self._third_party()
        if name in third_party:
            return third_party[name].load()
        raise ConfigurationError(f"Unknown {self.kind} {name!r}.", hint=f"Known: {', '.join(self.names())}.")

    def _third_party(self) -> dict[str, Any]:
        return {e.name: e for e in entry_points(group=self._group)} if self._group else {}
