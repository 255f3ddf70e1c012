"""The known chunks of one namespace: their texts, tokens and importance scores, found again in any prompt."""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np

from speccache_rag.chunks.catalogue import Catalogue
from speccache_rag.chunks.escaped import EscapedChunks
from speccache_rag.chunks.index import ChunkIndex
from speccache_rag.errors import ChunkTooLong, EmptyChunk, StoreError
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.scoring.alignment import align_scores
from speccache_rag.scoring.importance import SpeculativeScorer
from speccache_rag.store.base import Namespace
from speccache_rag.types import Chunk, ChunkMatch

logger = logging.getLogger(__name__)


class ChunkLibrary:
    """Index and catalogue of one namespace. Thread-safe; shared by everything that serves the same model and tenant.

    Args:
        tokenizer: the target model's.
        namespace: what the chunks' KV depends on.
        catalogue: where they are noted.
        anchor: the text they are captured behind.
        max_model_len: in tokens.
        model: the model's name, for people who look into the store.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        namespace: Namespace,
        catalogue: Catalogue,
        anchor: str,
        max_model_len: int,
        model: str = "",
    ) -> None:
        self.namespace = namespace
        self.anchor = anchor
        self._tokenizer = tokenizer
        self._catalogue = catalogue
        self._max_model_len = max_model_len
        about = {"model": model, "tenant": namespace.tenant or "", "dtype": namespace.dtype}
        catalogue.describe(namespace.digest, about)
        self._index = ChunkIndex(catalogue, namespace.digest)
        self.escaped = EscapedChunks(self.match)

    def __len__(self) -> int:
        return len(self._index)

    def chunk(self, text: str) -> Chunk:
        """The chunk of a text, known or new; a new one is not learned yet.

        Raises:
            EmptyChunk: the text is empty or white space.
            ChunkTooLong: it does not fit in the model's context behind the anchor.
        """
        stripped = text.strip()
        if not stripped:
            raise EmptyChunk(f"A chunk has no text: {text!r}.")
        known = self._index.get(stripped)
        if known is not None:
            return known
        token_ids, offsets = self._tokenizer.chunk_tokens(stripped)
        if not token_ids:
            raise EmptyChunk(f"The model's tokenizer has no token for any character of a chunk: {text!r}.")
        anchor_tokens = len(self.namespace.anchor_ids)
        # One more position: a capture is a request, and a request generates a token.
        if anchor_tokens + len(token_ids) + 1 > self._max_model_len:
            raise ChunkTooLong(
                f"A chunk has {len(token_ids)} tokens ({stripped[:40]!r}...); with {anchor_tokens} anchor tokens "
                f"at most {self._max_model_len - anchor_tokens - 1} fit in the model's context of "
                f"{self._max_model_len}."
            )
        return Chunk(self.namespace.key(token_ids), stripped, token_ids, offsets)

    def learn(self, chunk: Chunk) -> None:
        """Make a chunk findable, in every process that has the same store open or opens it later."""
        self._index.add(chunk)

    def some(self, most: int) -> list[Chunk]:
        """Up to so many of the known chunks, the oldest ones.

        Raises:
            StoreUnavailable: the catalogue cannot be read.
        """
        return list(islice(self._catalogue.chunks(self.namespace.digest), most))

    def match(self, prompt: str) -> list[ChunkMatch]:
        """The known chunks in a prompt. Where the catalogue cannot be read there are none, and a warning says so."""
        try:
            return self._index.find(prompt)
        except StoreError as error:
            logger.warning("speccache: nothing is reused: %s", error)
            return []

    def scores(self, chunk: Chunk, scorer: SpeculativeScorer) -> np.ndarray:
        """float32 [T]: importance of a chunk's tokens, scored alone behind the anchor; computed once, then kept."""
        kept = self._catalogue.scores(chunk.key, scorer.identity)
        if kept is not None:
            return kept
        offsets, scores = scorer.score_after(self.anchor, chunk.text)
        aligned = align_scores(offsets, scores, chunk.offsets)
        self._catalogue.put_scores(chunk.key, scorer.identity, aligned)
        return aligned
