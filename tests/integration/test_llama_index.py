"""A plain LlamaIndex query engine over a real model: chunks are reused, and the pipeline does not know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.llms.speccache import SpecCacheLLM, anchor_for
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from tests.parity.engines import CHUNKS

pytestmark = pytest.mark.vllm

QUESTION = "When was the mill of Arden built?"


@pytest.fixture(scope="module")
def llm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCacheLLM]:
    anchor = anchor_for(AutoTokenizer.from_pretrained(smollm2))
    llm = SpecCacheLLM(
        model=str(smollm2),
        speculative_model=str(smollm2),
        policy="speccache",
        store=str(tmp_path_factory.mktemp("store")),
        anchor=anchor,
        engine_options={
            "dtype": "float32",  # many CPUs have no bfloat16 of their own
            "max_model_len": 2048,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 512 << 20,
        },
        max_tokens=16,
    )
    llm.warm(CHUNKS, show_progress=False)
    yield llm
    llm.runtime.close()


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    nodes = [TextNode(text=text, metadata={"source": f"page {i}"}) for i, text in enumerate(CHUNKS)]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=8))


def test_query_engine_reuses_every_retrieved_chunk(llm: SpecCacheLLM, index: VectorStoreIndex) -> None:
    before = llm.runtime.stats()
    answer = index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
    after = llm.runtime.stats()
    assert "1892" in str(answer)
    assert after["chunks_reused"] - before["chunks_reused"] == 3
    assert after["missed_tokens"] == before["missed_tokens"]
    assert after["loaded_tokens"] - before["loaded_tokens"] >= 0.8 * (
        after["matched_tokens"] - before["matched_tokens"]
    )


def test_both_ends_answer_from_the_same_prompt(llm: SpecCacheLLM, index: VectorStoreIndex) -> None:
    answers = {}
    for policy in ("full_recompute", "speccache"):
        llm.runtime.reset_prefix_cache()
        engine = index.as_query_engine(llm=llm.with_options(policy=policy), similarity_top_k=3)
        answers[policy] = str(engine.query(QUESTION))
    assert "1892" in answers["full_recompute"]
    assert "1892" in answers["speccache"]


def test_streaming_query_engine(llm: SpecCacheLLM, index: VectorStoreIndex) -> None:
    response = index.as_query_engine(llm=llm, similarity_top_k=3, streaming=True).query(QUESTION)
    pieces = list(response.response_gen)
    assert len(pieces) > 1
    assert "1892" in "".join(pieces)


async def test_async_query_engine(llm: SpecCacheLLM, index: VectorStoreIndex) -> None:
    answer = await index.as_query_engine(llm=llm, similarity_top_k=3).aquery(QUESTION)
    assert "1892" in str(answer)


def test_usage_and_report_are_in_raw(llm: SpecCacheLLM) -> None:
    messages = [ChatMessage(role=MessageRole.USER, content=f"{CHUNKS[0]}\n\n{QUESTION}")]
    llm.runtime.reset_prefix_cache()
    response = llm.chat(messages)
    raw: Any = response.raw
    assert raw["usage"]["prompt_tokens"] == raw["speccache"]["prompt_tokens"]
    assert raw["usage"]["cached_tokens"] == raw["speccache"]["loaded_tokens"] > 0
    assert raw["speccache"]["policy"] == "speccache"


class Mill(BaseModel):
    """A mill."""

    village: Literal["Arden", "Boro", "Cale"]
    year_built: int = Field(ge=1000, le=2026)


@pytest.mark.parametrize("how", ["output_cls", "as_structured_llm"])
def test_an_object_comes_out_while_chunks_are_reused(llm: SpecCacheLLM, index: VectorStoreIndex, how: str) -> None:
    before = llm.runtime.stats()
    longer = llm.with_options(max_tokens=64)
    options: dict[str, Any] = (
        {"llm": longer, "output_cls": Mill} if how == "output_cls" else {"llm": longer.as_structured_llm(Mill)}
    )
    answer = index.as_query_engine(similarity_top_k=3, **options).query(QUESTION)
    after = llm.runtime.stats()
    assert isinstance(answer.response, Mill)
    assert after["chunks_reused"] - before["chunks_reused"] == 3
    assert after["missed_tokens"] == before["missed_tokens"]


async def test_objects_grow_in_a_stream(llm: SpecCacheLLM) -> None:
    prompt = PromptTemplate(f"{CHUNKS[0]}\n\n{QUESTION}")
    objects = [o async for o in await llm.with_options(max_tokens=64).astream_structured_predict(Mill, prompt)]
    assert len(objects) > 3
    assert isinstance(objects[-1], Mill)


def test_the_model_alone_gives_no_object(llm: SpecCacheLLM) -> None:
    """What the tests above would see if the schema never reached the engine."""
    prompt = PromptTemplate(f"{CHUNKS[0]}\n\n{QUESTION}")
    with pytest.raises(ValueError):
        llm.structured_predict(Mill, prompt, {"structured_outputs": None})


def test_context_window_is_the_engines_in_the_tokens_that_llama_index_counts(llm: SpecCacheLLM) -> None:
    assert llm.runtime.max_model_len == 2048
    # tests/unit/test_llama_index_llm.py has the exact rule; the two tokenizers differ little on these texts.
    assert 1024 < llm.metadata.context_window <= 2560
    assert llm.metadata.is_chat_model


def test_token_counting_handler_counts_what_the_engine_counted(llm: SpecCacheLLM) -> None:
    counter = TokenCountingHandler()
    counted = llm.model_copy(update={"callback_manager": CallbackManager([counter])})
    response = counted.chat([ChatMessage(role=MessageRole.USER, content=f"{CHUNKS[0]}\n\n{QUESTION}")])
    raw: Any = response.raw
    assert counter.prompt_llm_token_count == raw["usage"]["prompt_tokens"]
    assert counter.completion_llm_token_count == raw["usage"]["completion_tokens"]


def test_settings_llm_is_enough(llm: SpecCacheLLM, index: VectorStoreIndex) -> None:
    """The pipeline names no LLM at all."""
    Settings.llm = llm
    try:
        assert "1892" in str(index.as_query_engine(similarity_top_k=3).query(QUESTION))
    finally:
        Settings.llm = None
