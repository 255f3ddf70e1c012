"""What LlamaIndex's dispatcher hears: reuse events out, retrieval events in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.speccache import RetrieverHook, SpecCacheLLM, SpecCacheReuseEvent, install

from tests.unit.fake_runtime import FakeRuntime

QUESTION = [ChatMessage(role="user", content="Why?")]


class Listener(BaseEventHandler):
    """Collects all events."""

    seen: list[Any] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    listener = Listener(seen=[])
    handlers = get_dispatcher().event_handlers
    get_dispatcher().event_handlers = [*handlers, listener]
    yield listener.seen
    get_dispatcher().event_handlers = handlers


def reuse_events(heard: list[Any]) -> list[SpecCacheReuseEvent]:
    return [event for event in heard if isinstance(event, SpecCacheReuseEvent)]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def llm(runtime: FakeRuntime) -> SpecCacheLLM:
    return SpecCacheLLM(runtime=runtime)


# Reuse events.


def test_every_answer_fires_one_reuse_event(llm: SpecCacheLLM, heard: list[Any]) -> None:
    response = llm.chat(QUESTION)
    (event,) = reuse_events(heard)
    assert event.model == "tiny"
    assert event.report == response.raw["speccache"]
    assert event.usage == response.raw["usage"]
    assert event.class_name() == event.model_dump()["class_name"] == "SpecCacheReuseEvent"
    ends = [event for event in heard if isinstance(event, LLMChatEndEvent)]
    assert heard.index(event) < heard.index(ends[0])


@pytest.mark.parametrize("endpoint", ["complete", "stream_complete", "chat", "stream_chat"])
def test_sync_endpoints_fire(llm: SpecCacheLLM, heard: list[Any], endpoint: str) -> None:
    question: Any = QUESTION if "chat" in endpoint else "Why?"
    answer = getattr(llm, endpoint)(question)
    if endpoint.startswith("stream"):
        assert reuse_events(heard) == []
        next(answer)
        assert reuse_events(heard) == []  # not before the answer is complete
        list(answer)
    assert len(reuse_events(heard)) == 1


@pytest.mark.parametrize("endpoint", ["acomplete", "astream_complete", "achat", "astream_chat"])
async def test_async_endpoints_fire(llm: SpecCacheLLM, heard: list[Any], endpoint: str) -> None:
    question: Any = QUESTION if "chat" in endpoint else "Why?"
    answer = await getattr(llm, endpoint)(question)
    if "stream" in endpoint:
        assert len([response async for response in answer]) == 4
    assert len(reuse_events(heard)) == 1


def test_a_stream_left_early_fires_nothing(llm: SpecCacheLLM, heard: list[Any]) -> None:
    stream = llm.stream_chat(QUESTION)
    next(stream)
    stream.close()
    assert reuse_events(heard) == []


# Token counts.


@pytest.mark.parametrize("streamed", [False, True])
def test_token_counters_count_what_the_engine_counted(runtime: FakeRuntime, streamed: bool) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: ["wrong"] * 1000)
    llm = SpecCacheLLM(runtime=runtime, callback_manager=CallbackManager([counter]))
    if streamed:
        last = list(llm.stream_chat(QUESTION))[-1]
        usage = last.raw["usage"]
        list(llm.stream_complete("Why?"))
    else:
        usage = llm.chat(QUESTION).raw["usage"]
        llm.complete("Why?")
    # The prompt is the same in both calls.
    assert counter.prompt_llm_token_count == 2 * usage["prompt_tokens"]
    assert counter.completion_llm_token_count == 2 * usage["completion_tokens"] == 6


# install().


class Found(BaseRetriever):
    def __init__(self, *texts: str) -> None:
        self._texts = texts
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = [TextNode(text=text, metadata={"file": "a.md"}) for text in self._texts]
        return [NodeWithScore(node=node, score=1.0) for node in nodes]


def test_the_hook_prefetches_bare_texts_until_it_is_switched_off(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    before = list(get_dispatcher().event_handlers)
    assert "SpecCacheRetrieverHook" not in {handler.class_name() for handler in before}  # importing installs nothing
    hook = install(llm)
    assert isinstance(hook, RetrieverHook)
    Found(" one ", "two").retrieve("Why?")
    assert runtime.prefetched == [" one ", "two"]
    hook.remove()
    hook.remove()
    Found("three").retrieve("Why?")
    assert runtime.prefetched == [" one ", "two"]
    assert get_dispatcher().event_handlers == before


def test_two_hooks_are_switched_off_one_by_one(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    with install(llm):
        with install(llm):
            Found("one").retrieve("Why?")
        Found("two").retrieve("Why?")
    Found("three").retrieve("Why?")
    assert runtime.prefetched == ["one", "one", "two"]


async def test_the_hook_hears_of_async_and_fused_retrievals(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    fused = QueryFusionRetriever([Found("one"), Found("two")], llm=llm, num_queries=1)
    with install(llm):
        await fused.aretrieve("Why?")
    assert set(runtime.prefetched) == {"one", "two"}


def test_other_events_pass(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    with install(llm):
        llm.chat(QUESTION)
    assert runtime.prefetched == []
