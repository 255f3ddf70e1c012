"""A plain LCEL chain over a real model on vLLM: chunks are reused, and the chain does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from pydantic import BaseModel
from transformers import AutoTokenizer

from langchain_speccache import ChatSpecCache, anchor_for
from speccache_rag import SpecCacheConfig
from tests.integration.langchain.bench import join
from tests.parity.engines import CHUNKS

pytestmark = pytest.mark.vllm

QUESTION = "When was the mill of Arden built?"
PROMPT = ChatPromptTemplate.from_template(
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: "
)


class Shelf(BaseRetriever):
    """Finds all there is."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(text) for text in CHUNKS]


class Built(BaseModel):
    """When something was built."""

    year: int


@pytest.fixture(scope="module")
def llm(config: SpecCacheConfig) -> Iterator[ChatSpecCache]:
    anchor = anchor_for(AutoTokenizer.from_pretrained(config.model), PROMPT)
    llm = ChatSpecCache(config=config.model_copy(update={"anchor": anchor}), max_tokens=24)
    llm.warm(Shelf().invoke(QUESTION), show_progress=False)
    yield llm
    llm.runtime.close()


def chain(llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    return {"context": Shelf() | join, "question": RunnablePassthrough()} | PROMPT | llm


def test_every_retrieved_chunk_is_reused(llm: ChatSpecCache) -> None:
    llm.runtime.reset_prefix_cache()
    answer = chain(llm).invoke(QUESTION)
    report = answer.response_metadata["speccache"]
    assert "1892" in answer.text
    assert (report["chunks_reused"], report["missed_tokens"]) == (3, 0)
    assert answer.usage_metadata["input_tokens"] == report["prompt_tokens"]
    assert answer.usage_metadata["input_token_details"]["cache_read"] == report["loaded_tokens"]
    assert report["loaded_tokens"] >= 0.8 * report["matched_tokens"] > 0


async def test_streams_reuse_them_too(llm: ChatSpecCache) -> None:
    pieces = list(chain(llm).stream(QUESTION))
    apieces = [piece async for piece in chain(llm).astream(QUESTION)]
    for found in (pieces, apieces):
        assert len(found) > 3
        assert "1892" in "".join(piece.text for piece in found)
        assert found[-1].response_metadata["speccache"]["chunks_reused"] == 3


def test_both_ends_answer_from_the_same_prompt(llm: ChatSpecCache) -> None:
    for policy in ("full_recompute", "speccache"):
        llm.runtime.reset_prefix_cache()
        answer = chain(llm.bind(policy=policy)).invoke(QUESTION)
        assert "1892" in answer.text
        assert answer.response_metadata["speccache"]["policy"] == policy


def test_objects_come_out_under_a_schema(llm: ChatSpecCache) -> None:
    found = chain(llm.with_structured_output(Built)).invoke(QUESTION)
    assert isinstance(found, Built)
    assert str(found.year) in join(Shelf().invoke(QUESTION))  # so small a model takes one year for another


def test_logprobs_belong_to_the_answer(llm: ChatSpecCache) -> None:
    answer = llm.invoke("Say hello.", logprobs=2, max_tokens=4)
    steps = answer.response_metadata["logprobs"]["content"]
    assert len(steps) == answer.usage_metadata["output_tokens"]
    assert "".join(step["token"] for step in steps).startswith(answer.text)
    assert all(step["logprob"] <= 0 for step in steps)
