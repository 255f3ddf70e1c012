"""The values that travel between the layers.

Shape letters, used everywhere: T tokens, H KV heads, D head dim, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NewType

import numpy as np
import torch

ChunkKey = NewType("ChunkKey", str)
"""Content address of one chunk's KV: 64 hex digits, the same in every process (store/base.py)."""

Offsets = np.ndarray
"""int32 [T, 2]: for each token its first and past-the-end character."""

Spans = tuple[tuple[int, int], ...]
"""(start, end) in characters each, in order, without overlaps."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A known chunk: its stripped text, and the target tokens it was (or will be) captured with."""

    key: ChunkKey
    text: str
    token_ids: tuple[int, ...]
    offsets: Offsets
    """[T, 2], characters of `text`."""

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """One chunk's keys and values, as the model wrote them at positions `position .. position + T - 1`."""

    keys: torch.Tensor
    """[L, T, H, D], RoPE applied at the captured positions."""
    values: torch.Tensor
    """[L, T, H, D]"""
    token_ids: tuple[int, ...]
    position: int
    """Position of the first token at capture: the length of the anchor prefix."""

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape != self.values.shape or self.keys.shape[1] != len(self.token_ids):
            raise ValueError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must both be "
                f"[L, T, H, D] with T = {len(self.token_ids)} token ids"
            )

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class ChunkMatch:
    """A known chunk found in a prompt string. `whole` is False where only a prefix of the chunk is there."""

    chunk: Chunk
    char_start: int
    char_end: int
    n_tokens: int
    """How many of the chunk's tokens are there: all of them, or the prefix."""

    @property
    def whole(self) -> bool:
        return self.n_tokens == self.chunk.n_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """A chunk's tokens at `start .. start + length - 1` of the prompt."""

    chunk: Chunk
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class AssembledPrompt:
    """A prompt as token ids, with the known chunks in it.

    `placements` are in prompt order and do not overlap. The reuse region is `[0, region_end)`.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: Offsets
    """[T, 2], characters of `text`; tokens the tokenizer added itself (BOS) have an empty range."""
    placements: tuple[Placement, ...]
    spelled: Spans = ()
    """Characters of `text` that spell a control token and mean the text (see prompt/control.py)."""

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def region_end(self) -> int:
        return self.placements[-1].end if self.placements else 0

    @property
    def n_chunk_tokens(self) -> int:
        """N of the budget: tokens that belong to a known chunk."""
        return sum(p.length for p in self.placements)

    def chunk_positions(self) -> np.ndarray:
        """int64 [N], sorted: the positions of all chunk tokens."""
        if not self.placements:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(p.start, p.end) for p in self.placements])


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Chunk positions to recompute: int64 [K'], sorted, unique, each inside a placement."""

    positions: np.ndarray
    recompute_ratio: float
    """The ratio asked for; `effective_ratio` is what came of it."""
    n_chunk_tokens: int

    @property
    def effective_ratio(self) -> float:
        return len(self.positions) / self.n_chunk_tokens if self.n_chunk_tokens else 0.0


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What happened to a prompt's tokens before the first new token, and how long it took.

    `cached + loaded + recomputed + missed + fresh == prompt` tokens, always.
    """

    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Tokens of known chunks found in the prompt."""
    cached_tokens: int = 0
    """Tokens the engine's own prefix cache already held; nothing was done for them."""
    loaded_tokens: int = 0
    """Chunk tokens whose stored KV was used as it is."""
    recomputed_tokens: int = 0
    """Chunk tokens whose stored KV was replaced, because the policy chose them."""
    missed_tokens: int = 0
    """Chunk tokens without usable stored KV."""
    fresh_tokens: int = 0
    """Tokens outside any chunk: template, separators, question."""
    chunks_matched: int = 0
    chunks_reused: int = 0
    missed_keys: tuple[str, ...] = ()
    fault: str | None = None
    """Why nothing was reused although chunks were stored, where the engine failed at it; else None."""
    policy: str = "full_recompute"
    scoring: str | None = None
    recompute_ratio: float = 1.0
    effective_ratio: float = 1.0
    ttft_s: float = 0.0
    """Submit to first token; the parts below add up to it."""
    score_s: float = 0.0
    align_s: float = 0.0
    """Matching, tokenization, alignment and selection."""
    load_s: float = 0.0
    load_hidden_s: float = 0.0
    """Loading that was done early, beside scoring or since the retriever returned; no part of `ttft_s`."""
    recompute_s: float = 0.0
    prefill_s: float = 0.0
    """The rest: queueing, prefill of the query, the first decode step."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts under their usual names."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were not computed: loaded from the store or from the prefix cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total_tokens": self.total_tokens}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that an answer asks for."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it: a small model's may not parse."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a streamed tool call. Its first piece carries `id` and `name`; `arguments` add up."""

    index: int
    """Which of the answer's tool calls."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def joined_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Tool calls put together from their pieces, in the order of their indices."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        before = calls.get(piece.index, ToolCall("", "", ""))
        name, arguments = before.name + (piece.name or ""), before.arguments + piece.arguments
        calls[piece.index] = ToolCall(before.id or piece.id or "", name, arguments)
    return tuple(calls[index] for index in sorted(calls))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer."""

    text: str
    report: PrefillReport
    usage: Usage
    finish_reason: str | None
    logprobs: list[Mapping[int, float]] | None = None
    """One {token id: logprob} per new token, where logprobs were asked for."""
    reasoning: str | None = None
    """What the model thought before it answered, where its notation is known; no part of `text`."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer. Only the last one carries `completion`."""

    text: str
    completion: Completion | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The new tokens since the piece before."""


@dataclass(frozen=True, slots=True)
class BadText:
    """A text that cannot be a chunk: its place among those given, and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm run did."""

    n_texts: int = 0
    n_captured: int = 0
    n_skipped: int = 0
    """Already in the store, or repeated in the input."""
    captured_tokens: int = 0
    captured_bytes: int = 0
    speculative_bytes: int = 0
    """KV that the speculative model keeps for itself, beside the target's; only some policies need it."""
    n_held: int = 0
    """Distinct chunks of the input whose KV the store holds at the end: not all where its budget is less."""
    bad: tuple[BadText, ...] = ()
    """Texts that were skipped because they cannot be chunks."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TokenExplanation:
    """One prompt token in `SpecCache.explain`."""

    position: int
    token_id: int
    text: str
    chunk: int | None
    """Index of the chunk in the prompt, None outside any chunk."""
    action: str
    """"loaded", "recomputed", "missed" or "fresh"."""
    score: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would be done with a prompt, token by token."""

    tokens: tuple[TokenExplanation, ...]
    report: PrefillReport = field(default_factory=PrefillReport)

    def __iter__(self) -> Iterator[TokenExplanation]:
        return iter(self.tokens)
