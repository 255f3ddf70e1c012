"""Studies: the contestants behind each figure of a report."""

from __future__ import annotations

from speccache_rag.errors import ConfigurationError

SMOOTH = (0.1, 0.2, 0.4, 0.8)
COVER = (0.3, 0.5, 0.7, 0.9)

STUDIES = {
    "layers": [f"speccache(complete=false, layers={r})" for r in ("all", "last_two_thirds", "last_third", "last")],
    "spans": ["speccache(complete=false)", "speccache(complete=true)"],
    "tau": [f"speccache(tau_smooth={s}, tau_cover={c})" for s in SMOOTH for c in COVER],
    "scorers": ["speccache(complete=false)", "attended", "attended(target)"],
}
"""Policies by figure."""


def studied(name: str) -> list[str]:
    """The policies of a study.

    Raises:
        ConfigurationError: there is no such study; the message lists those there are.
    """
    if name not in STUDIES:
        raise ConfigurationError(f"study is {name!r}.", hint=f"Known: {', '.join((*STUDIES, 'deviation'))}.")
    return STUDIES[name]


def everything(speculative: bool) -> list[str]:
    """Every policy of this package; those that ask a speculative model only where there is one."""
    found = ["full_reuse", "random", "epic", "cacheblend", "cacheblend(key)", "attended(target)"]
    if speculative:
        found += ["speccache", "speccache(complete=false)", "attended"]
    return found
