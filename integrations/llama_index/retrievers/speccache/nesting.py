"""A `SpecCacheLLM` as a field of another component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from llama_index.llms.speccache import SpecCacheLLM
from pydantic import BeforeValidator, SerializeAsAny


def _revived(value: Any) -> Any:
    """LlamaIndex rebuilds the outermost component of a dict only."""
    return SpecCacheLLM.from_dict(dict(value)) if isinstance(value, Mapping) else value


NestedLLM = Annotated[SerializeAsAny[SpecCacheLLM], BeforeValidator(_revived)]
"""Survives `to_dict` and `from_dict` of the component that holds it."""
