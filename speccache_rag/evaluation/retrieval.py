"""Retrieval for questions of one's own: from a Chroma collection, or by an object of one's own code."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccache_rag.errors import ConfigurationError
from speccache_rag.evaluation.datasets import Retrieve


def from_chroma(path: Path, collection: str | None, top_k: int) -> Retrieve:
    """The texts nearest to a question in a persistent Chroma collection, by its own embedding function.

    Raises:
        ConfigurationError: Chroma is not installed, or there is no such folder or collection; the message lists those
            there are.
    """
    try:
        import chromadb
    except ImportError as error:
        raise ConfigurationError(
            "Reading a Chroma collection needs the package chromadb.", hint="pip install 'speccache-rag[chroma]'"
        ) from error
    if not path.is_dir():
        raise ConfigurationError(f"There is no Chroma folder {str(path)!r}.", hint="Name the one of PersistentClient.")
    client = chromadb.PersistentClient(path=str(path), settings=chromadb.config.Settings(anonymized_telemetry=False))
    names = sorted(found.name for found in client.list_collections())
    if collection is None and len(names) == 1:
        collection = names[0]
    if collection not in names:
        raise ConfigurationError(
            f"Chroma folder {str(path)!r} has no collection {collection!r}.",
            hint=f"Pass --collection with one of: {', '.join(names) or '(it is empty)'}.",
        )
    found = client.get_collection(collection)

    def retrieve(question: str) -> list[str]:
        documents = found.query(query_texts=[question], n_results=top_k, include=["documents"])["documents"]
        return [text for text in (documents or [[]])[0] if text and text.strip()]

    return retrieve


def from_code(path: str, top_k: int) -> Retrieve:
    """What `module:attribute` retrieves: a LlamaIndex index or retriever, a LangChain retriever, or a function.

    A function takes the question and returns texts.

    Raises:
        ConfigurationError: it cannot be imported, or is none of these.
    """
    module, mark, attribute = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute) if mark else None
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigurationError(f"{path!r} cannot be imported: {error}.", hint="Write module:attribute.") from error
    if hasattr(found, "as_retriever"):
        found = _llama_or_lang(found, top_k)
    ask = next((getattr(found, name) for name in ("retrieve", "invoke") if hasattr(found, name)), found)
    if not callable(ask):
        raise ConfigurationError(
            f"{path!r} is {found!r}, which retrieves nothing.",
            hint="Name an index, a retriever, or a function from a question to texts, as module:attribute.",
        )
    return lambda question: _texts(ask(question))[:top_k]


def _llama_or_lang(index: Any, top_k: int) -> Any:
    """The retriever of a LlamaIndex index or of a LangChain vector store."""
    if type(index).__module__.startswith("llama_index"):
        return index.as_retriever(similarity_top_k=top_k)
    return index.as_retriever(search_kwargs={"k": top_k})


def _texts(found: Sequence[Any]) -> list[str]:
    """The bare texts of what was retrieved: LlamaIndex nodes, LangChain documents, or texts."""
    texts = []
    for item in found:
        if isinstance(item, str):
            texts.append(item)
        elif hasattr(item, "page_content"):
            texts.append(item.page_content)
        else:
            texts.append(item.get_content())
    return [text for text in texts if text.strip()]
