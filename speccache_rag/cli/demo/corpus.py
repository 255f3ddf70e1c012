"""The demo's documents: the READMEs that installed packages carry in their metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

from speccache_rag.errors import ConfigurationError

MIN_CHARS = 1_500
MAX_CHARS = 20_000
"""Shorter READMEs say little; longer ones are changelogs and would fill the corpus alone."""

NOISE = re.compile(
    r"""
      <!--.*?-->                                  # HTML comments
    | \[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)           # Markdown badges: an image inside a link
    | !\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])         # Markdown images
    | ^\.\.[ ](?:\|[^|\n]+\|[ ])?image::[^\n]*(?:\n[ ]+:[^\n]*)*   # reStructuredText images and their options
    | </?(?:a|b|br|center|details|div|em|h[1-6]|hr|i|img|p|picture|source|span|strong|sub|summary|sup|table|tbody
        |td|th|thead|tr|ul|li|video)\b[^<>]*>      # HTML tags that READMEs are laid out with
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
"""Left out of a README. The text itself is kept letter by letter."""


@dataclass(frozen=True, slots=True)
class Readme:
    """The long description of one installed package."""

    package: str
    version: str
    text: str


def installed_readmes() -> list[Readme]:
    """READMEs of `MIN_CHARS` to `MAX_CHARS` characters in this environment, sorted by package name."""
    found = {_name(d): Readme(_name(d), d.version, without_noise(_description(d))) for d in distributions()}
    return [found[name] for name in sorted(found) if MIN_CHARS <= len(found[name].text) <= MAX_CHARS]


def ordered(readmes: Sequence[Readme], first: Iterable[str]) -> list[Readme]:
    """The READMEs of the packages named in `first`, in that order, then all others in theirs.

    Raises:
        ConfigurationError: a named package is not among the READMEs.
    """
    by_name = {readme.package: readme for readme in readmes}
    wanted = list(dict.fromkeys(first))
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise ConfigurationError(
            f"The demo asks about packages without a README here: {', '.join(missing)}.",
            hint=f"Install them; a README must have {MIN_CHARS:,} to {MAX_CHARS:,} characters.",
        )
    return [by_name[name] for name in wanted] + [readme for readme in readmes if readme.package not in wanted]


def without_noise(text: str) -> str:
    """A README without badges, images, HTML tags and runs of blank lines."""
    lines = (line.rstrip() for line in NOISE.sub("", text).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _name(distribution: Distribution) -> str:
    return str(distribution.metadata["Name"]).lower()


def _description(distribution: Distribution) -> str:
    return next(iter(distribution.metadata.get_all("Description") or ()), "")
