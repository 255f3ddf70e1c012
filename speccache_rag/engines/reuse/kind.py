"""The kind of approximation: what prompts must share so that one may find the KV of another in a prefix cache."""

from __future__ import annotations

import hashlib
import json

from speccache_rag.scoring.questions import Importance
from speccache_rag.selection.base import SelectionPolicy


def exact_kind(tenant: str | None) -> str:
    """The kind of prompts whose KV is all computed: their tenant's own, and "" where there is no tenant."""
    return "" if tenant is None else _digest("exact", tenant)


def approximate_kind(
    namespace_digest: str,
    policy: SelectionPolicy,
    recompute_ratio: float,
    scoring: str,
    speculative_model: str | None,
) -> str:
    """The kind of all prompts under a policy that reuses KV, with chunks in them or without.

    Two such prompts may have recomputed different tokens of the text they share: both are approximations of the same
    quality, and an exact prompt never finds either.

    Args:
        namespace_digest: of the chunks that are reused; it names tenant and anchor (store/base.py).
        policy: with its options.
        recompute_ratio: as asked for.
        scoring: how importance is scored; counts where the policy asks for it.
        speculative_model: counts where the policy needs one.
    """
    questions = policy.questions()
    return _digest(
        "approximate",
        namespace_digest,
        type(policy).__module__,
        repr(policy),  # a dataclass, so its name and options, and those of a policy that it wraps
        recompute_ratio if policy.fixed_ratio is None else policy.fixed_ratio,
        scoring if any(isinstance(question, Importance) for question in questions) else None,
        speculative_model if policy.needs_speculative_model else None,
    )


def _digest(*parts: object) -> str:
    text = json.dumps(parts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
