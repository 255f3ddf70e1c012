"""A scripted stand-in for `SpecCache`: same methods, no model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from speccache_rag.config import SpecCacheConfig
from speccache_rag.runtime import SpecCache
from speccache_rag.types import (
    Chunk,
    Completion,
    Delta,
    Explanation,
    PrefillReport,
    TokenExplanation,
    ToolCallDelta,
    Usage,
    WarmReport,
    joined_calls,
)

Prompt = str | Sequence[Mapping[str, str]]


class FakeTokenizer:
    """Splits at white space; its template shows texts alone, and tools where `knows_tools` says so."""

    def __init__(self, *, knows_tools: bool = False) -> None:
        self.chat_template: str | None = "a template"
        self.name_or_path = "tiny"
        self.knows_tools = knows_tools

    def encode(self, text: str, **_: Any) -> list[str]:
        return text.split()

    def apply_chat_template(self, turns: Sequence[Mapping[str, str]], *, tools: Any = None, **_: Any) -> str:
        shown = [str(tools)] if tools and self.knows_tools else []
        return "\n".join([*shown, *(turn["content"] for turn in turns)])


class FakeRuntime:
    """Answers every prompt with `pieces`; `calls` holds what it was asked, in order."""

    def __init__(
        self,
        config: SpecCacheConfig | None = None,
        *,
        pieces: Sequence[str] = ("The ", "answer", "."),
        tokenizer: Any = None,
        max_model_len: int = 4096,
        finish_reason: str = "stop",
        reasoning: Sequence[str] = (),
        tool_calls: Sequence[ToolCallDelta] = (),
    ) -> None:
        self.config = config or SpecCacheConfig(model="tiny", policy="speccache")
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.reasoning, self.tool_calls = reasoning, tool_calls
        """Streamed in front of the pieces, and behind them."""
        self.tokenizer = tokenizer or FakeTokenizer()
        self.max_model_len = max_model_len
        self.calls: list[tuple[Prompt, dict[str, Any]]] = []
        self.chunks: list[Chunk] = []
        self.warmed: list[str] = []
        self.prefetched: list[str] = []
        self.resets = 0
        self.running = 0
        self.closed = False
        self.fault: Exception | None = None
        self.logprobs: list[Mapping[int, float]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeRuntime:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self.config,)

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def start(self) -> None:
        return None

    def warm(self, texts: Iterable[str], show_progress: bool = True, *, skip_bad: bool = False) -> WarmReport:
        new = list(texts)
        self.warmed += new
        return WarmReport(n_texts=len(new), n_captured=len(new), captured_tokens=sum(len(t.split()) for t in new))

    def prefetch(self, texts: Iterable[str]) -> None:
        self.prefetched += texts

    def some_chunks(self, most: int) -> list[Chunk]:
        return self.chunks[:most]

    def stream(self, prompt: Prompt, **params: Any) -> Generator[Delta, None, None]:
        self.calls.append((prompt, params))
        if self.fault is not None:
            raise self.fault
        text = ""
        self.running += 1
        try:
            for thought in self.reasoning:
                yield Delta("", reasoning=thought)
            for piece in self.pieces:
                text += piece
                yield Delta(piece)
            for call in self.tool_calls:
                yield Delta("", tool_calls=(call,))
            yield Delta("", self._completion(prompt, text, params))
        finally:
            self.running -= 1

    def generate(self, prompt: Prompt, **params: Any) -> Completion:
        return [delta.completion for delta in self.stream(prompt, **params)][-1]

    async def astream(self, prompt: Prompt, **params: Any) -> AsyncIterator[Delta]:
        with closing(self.stream(prompt, **params)) as deltas:
            for delta in deltas:
                await asyncio.sleep(0)
                yield delta

    async def agenerate(self, prompt: Prompt, **params: Any) -> Completion:
        return [delta.completion async for delta in self.astream(prompt, **params)][-1]

    def explain(self, prompt: Prompt, **params: Any) -> Explanation:
        self.calls.append((prompt, params))
        actions = ("fresh", "loaded", "recomputed", "missed")
        tokens = tuple(
            TokenExplanation(i, i, f"[{action}]\n", None if action == "fresh" else 0, action, None)
            for i, action in enumerate(actions)
        )
        return Explanation(tokens, PrefillReport(prompt_tokens=4, fresh_tokens=1, loaded_tokens=1))

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def doctor(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="engine", ok=True, detail="starts")]

    def _completion(self, prompt: Prompt, text: str, params: Mapping[str, Any]) -> Completion:
        """Full recompute takes six seconds to the first token, anything else two."""
        n = len(str(prompt).split())
        policy = params.get("policy") or self.config.policy
        scoring = params.get("scoring") or self.config.scoring
        ttft_s = 6.0 if policy == "full_recompute" else 2.0
        report = PrefillReport(prompt_tokens=n, fresh_tokens=n, policy=policy, scoring=scoring, ttft_s=ttft_s)
        usage, calls = Usage(n, len(self.pieces)), joined_calls(self.tool_calls)
        reason, thought = "tool_calls" if calls else self.finish_reason, "".join(self.reasoning) or None
        return Completion(text, report, usage, reason, self.logprobs, thought, calls)


class LoadingRuntime(FakeRuntime):
    """Notes the threads in which it was asked for what may take long: the tokenizer, and facts of the engine."""

    asked: list[int]

    @property
    def tokenizer(self) -> Any:
        self.asked.append(threading.get_ident())
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.asked, self._tokenizer = [], tokenizer

    @property
    def max_model_len(self) -> int:
        self.asked.append(threading.get_ident())
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int) -> None:
        self._max_model_len = tokens


def _shared(config: SpecCacheConfig) -> SpecCache:
    return SpecCache.shared(config)
