from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

from speccache_rag import errors
from speccache_rag.errors import ConfigurationError, SpecCacheError, StoreError


def family(root: type[SpecCacheError]) -> Iterator[type[SpecCacheError]]:
    yield root
    for child in root.__subclasses__():
        yield from family(child)


TREE = list(family(SpecCacheError))


@pytest.mark.parametrize("error_type", TREE, ids=lambda t: t.__name__)
@pytest.mark.parametrize(
    "copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
@pytest.mark.parametrize("hint", [None, "Do this."], ids=["own hint", "given hint"])
def test_copies_keep_message_hint_and_type(
    error_type: type[SpecCacheError], copied: Callable[[SpecCacheError], SpecCacheError], hint: str | None
) -> None:
    error = error_type("It is 7; the limit is 5.", hint=hint)
    twin = copied(error)
    assert type(twin) is error_type
    assert (twin.message, twin.hint, str(twin)) == (error.message, error.hint, str(error))


@pytest.mark.parametrize("error_type", TREE, ids=lambda t: t.__name__)
def test_the_tree_in_the_docstring_names_every_error(error_type: type[SpecCacheError]) -> None:
    assert errors.__doc__ is not None
    assert f" {error_type.__name__} " in errors.__doc__.replace("\n", " ")


def test_the_hint_is_part_of_the_text() -> None:
    assert str(ConfigurationError("Bad.", hint="Do this.")) == "Bad. Do this."
    assert str(ConfigurationError("Bad.")) == f"Bad. {ConfigurationError.hint}"
    assert str(StoreError("Bad.")) == "Bad."


def test_a_given_hint_stays_with_its_error() -> None:
    ConfigurationError("Bad.", hint="Do this.")
    assert ConfigurationError("Bad.").hint != "Do this."
