"""Contestants of an evaluation: policies with their options, scorers and ratios, as the command line names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_rag.config import Scoring
from speccache_rag.errors import ConfigurationError
from speccache_rag.scoring.questions import Importance
from speccache_rag.selection.base import SelectionPolicy
from speccache_rag.selection.factory import build_policy


@dataclass(frozen=True, slots=True)
class Contestant:
    """A policy at one recompute ratio."""

    policy: str
    """An expression that `build_policy` takes."""
    recompute_ratio: float
    speculative_model: str | None = None
    """Of a policy that asks one; None for all others."""
    scoring: Scoring = "cached"

    @property
    def built(self) -> SelectionPolicy:
        """The policy itself."""
        return build_policy(self.policy)

    @property
    def name(self) -> str:
        """The policy, without its ratio, and who scores for it where that is a second model."""
        if self.speculative_model is None:
            return self.policy
        way = [str(self.scoring)] if _asks_importance(self.built) else []
        return f"{self.policy} by {', '.join([Path(self.speculative_model).name, *way])}"


def contestants(
    policies: Sequence[str], ratios: Sequence[float], speculative_models: Sequence[str], scorings: Sequence[Scoring]
) -> list[Contestant]:
    """Every policy at every ratio; one that asks a speculative model stands there once for each of them.

    Args:
        policies: expressions of `build_policy`; `@0.1` behind one gives it a ratio of its own.
        ratios: for all the others.
        speculative_models: folders or hub ids.
        scorings: for the policies that ask for importance.

    Raises:
        ConfigurationError: a policy or its ratio makes no sense, or it asks a speculative model and there is none.
    """
    found: dict[Contestant, None] = {}
    for written in policies:
        policy, own = split_ratio(written)
        built = build_policy(policy)
        if built.needs_speculative_model and not speculative_models:
            raise ConfigurationError(
                f"Policy {policy!r} asks a speculative model, and none is named.", hint="Pass --speculative MODEL."
            )
        models = speculative_models if built.needs_speculative_model else [None]
        ways = scorings if _asks_importance(built) else scorings[:1]
        for ratio in _ratios(built, own, ratios):
            found |= {Contestant(policy, ratio, model, way): None for model in models for way in ways}
    return list(found)


def split_list(text: str) -> list[str]:
    """The items of a list with commas between them; commas in brackets belong to an item."""
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items if item.strip()]


def split_ratio(written: str) -> tuple[str, float | None]:
    """Policy and ratio of `policy@ratio`; None where there is no @.

    Raises:
        ConfigurationError: no number in [0, 1] stands behind the @.
    """
    policy, mark, ratio = written.partition("@")
    if not mark:
        return policy, None
    try:
        value = float(ratio)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{written!r} has no ratio in [0, 1] behind its @.", hint="Write epic@0.1.")
    return policy, value


def _asks_importance(policy: SelectionPolicy) -> bool:
    return any(isinstance(question, Importance) for question in policy.questions())


def _ratios(policy: SelectionPolicy, own: float | None, ratios: Iterable[float]) -> Iterable[float]:
    if policy.fixed_ratio is not None:
        return [policy.fixed_ratio]
    return ratios if own is None else [own]


def expression_of(policy: str, options: Mapping[str, Any]) -> str:
    """A configured policy with its options as one expression."""
    if not options:
        return policy
    told = ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()
    )
    return f"{policy}({told})"
