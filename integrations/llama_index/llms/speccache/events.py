"""The event that says what was reused, for every answer."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import Dispatcher, get_dispatcher  # type: ignore[attr-defined]  # no __all__
from llama_index.core.instrumentation.events import BaseEvent

from speccache_rag.types import Completion

dispatcher: Dispatcher = get_dispatcher(__name__)


class SpecCacheReuseEvent(BaseEvent):
    """Fired once an answer is complete, just before LlamaIndex's own end event of the call."""

    model: str = Field(description="The target model.")
    report: dict[str, Any] = Field(description="The prefill report: prompt tokens by what was done with them, seconds.")
    usage: dict[str, int] = Field(description="Token counts under their usual names.")

    @classmethod
    def class_name(cls) -> str:
        """Name under which handlers and logs know it."""
        return "SpecCacheReuseEvent"


def fire_reuse_event(model: str, completion: Completion) -> None:
    """Tell every handler on LlamaIndex's dispatcher about a finished answer."""
    event = SpecCacheReuseEvent(model=model, report=completion.report.to_dict(), usage=completion.usage.to_dict())
    dispatcher.event(event)
