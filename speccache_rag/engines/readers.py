"""The readers of reasoning and tool calls in an answer: the seam to vLLM's parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from speccache_rag.prompt.chat import Chat
from speccache_rag.registry import Registry
from speccache_rag.types import Delta

READERS = Registry("answer reader", {"vllm": "speccache_rag.engines.vllm:vllm_reader"})
"""Names to functions that take a `ReaderRequest` and give an `AnswerReader`."""


@dataclass(frozen=True, slots=True)
class ReaderRequest:
    """A chat whose answer is to be read, and how."""

    chat: Chat
    sampling: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    tool_parser: str | None
    reasoning_parser: str | None


class AnswerReader(Protocol):
    """Reads one answer, piece by piece."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The call's sampling options, changed so that the answer can be read: a grammar forces a call."""
        ...

    def read(self, piece: Delta, prompt_ids: Sequence[int]) -> Delta:
        """The piece with its text split into answer, reasoning and parts of tool calls.

        `piece.completion` marks the last one; it is not looked into.
        """
        ...
