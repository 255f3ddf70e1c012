"""From a prompt string to token ids with known chunks in them: matching, assembly, alignment."""

from __future__ import annotations

from speccache_rag.prompt.alignment import align_scores
from speccache_rag.prompt.assembly import PromptTokenizer
from speccache_rag.prompt.matching import ChunkIndex

__all__ = ["ChunkIndex", "PromptTokenizer", "align_scores"]
