"""The demo's measurement: each question through the same query engine, once plainly prefilled and once reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.llms.speccache import SpecCacheLLM
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base import BaseEvent

from speccache_rag.errors import ContextOverflow


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question under one policy; `report` is a `PrefillReport` as a dict."""

    text: str
    report: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        return float(self.report["ttft_s"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question answered from the same prompt with full recompute and with reuse."""

    question: str
    full: Answer
    reuse: Answer

    @property
    def speedup(self) -> float:
        return self.full.ttft_s / self.reuse.ttft_s

    def to_dict(self) -> dict[str, Any]:
        """The record of the JSON file; `report` is that of the reused run."""
        return {
            "question": self.question,
            "answer_full": self.full.text,
            "answer_reuse": self.reuse.text,
            "prompt_tokens": self.reuse.report["prompt_tokens"],
            "ttft_full_s": self.full.ttft_s,
            "ttft_reuse_s": self.reuse.ttft_s,
            "report": self.reuse.report,
        }


def median_speedup(comparisons: list[Comparison]) -> float:
    """The middle one of the speed-ups of time to first token."""
    return median(comparison.speedup for comparison in comparisons)


class Asker:
    """Asks questions through a plain LlamaIndex query engine and keeps what the LLM reports."""

    def __init__(self, index: VectorStoreIndex, llm: SpecCacheLLM, *, similarity_top_k: int) -> None:
        self._index = index
        self._llm = llm
        self._top_k = similarity_top_k

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer with an empty prefix cache, so that only stored chunk KV can save work.

        Args:
            question: Any question.
            options: What differs from the LLM's own options: policy, scoring, max_tokens, ...

        Raises:
            ContextOverflow: the retrieved chunks need more than one prompt.
        """
        self._llm.runtime.reset_prefix_cache()
        engine = self._index.as_query_engine(llm=self._llm.with_options(**options), similarity_top_k=self._top_k)
        with llm_responses() as responses:
            text = str(engine.query(question))
        if len(responses) != 1:
            raise ContextOverflow(
                f"{question!r} took {len(responses)} prompts: {self._top_k} chunks do not fit in one.",
                hint="Take smaller chunks, or raise max_model_len with --engine-option.",
            )
        return Answer(text.strip(), responses[0].raw["speccache"])

    def rehearse(self, question: str) -> None:
        """Go once through every path that is timed later, so that no timed run pays for first use."""
        for options in ({"policy": "full_recompute"}, {}, {"scoring": "online"}):
            self.ask(question, max_tokens=1, **options)

    def compare(self, question: str, **options: Any) -> Comparison:
        """Both answers; `options` apply to the reused one."""
        full = self.ask(question, policy="full_recompute")
        return Comparison(question, full, self.ask(question, **options))


class _Collector(BaseEventHandler):
    """Keeps the final response of every LLM call."""

    responses: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "SpecCacheDemoCollector"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.responses.append(event.response)


@contextmanager
def llm_responses() -> Iterator[list[Any]]:
    """The responses of LLM calls made inside the block; query engines do not hand them out."""
    collector = _Collector(responses=[])
    dispatcher = get_dispatcher()
    dispatcher.add_event_handler(collector)
    try:
        yield collector.responses
    finally:
        dispatcher.event_handlers.remove(collector)
