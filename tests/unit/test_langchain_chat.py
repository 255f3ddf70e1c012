"""`ChatSpecCache` against a scripted runtime: what LangChain sees, and what the runtime is asked."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField
from transformers import PreTrainedTokenizerFast

from langchain_speccache import ChatSpecCache, SpecCacheCompletion
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError
from speccache_rag.runtime import SpecCache
from speccache_rag.types import Completion, Delta, PrefillReport, Usage
from tests.tiny import tiny_tokenizer
from tests.unit.fake_runtime import FakeRuntime, LoadingRuntime

QUESTION = [SystemMessage("Be brief."), HumanMessage("Why?")]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
ANSWER = "The answer."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def runtime(tokenizer: PreTrainedTokenizerFast) -> FakeRuntime:
    return FakeRuntime(tokenizer=tokenizer)


@pytest.fixture
def llm(runtime: FakeRuntime) -> ChatSpecCache:
    return ChatSpecCache(runtime=runtime)


class Tokens(BaseCallbackHandler):
    """Collects what callbacks are told of a stream."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.ends: list[Any] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ends.append(response)


def assert_whole(message: AIMessage) -> None:
    assert message.text == ANSWER
    usage = message.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert usage["input_token_details"] == {"cache_read": 0}
    facts = message.response_metadata
    assert (facts["model_name"], facts["model_provider"], facts["finish_reason"]) == ("tiny", "speccache", "stop")
    assert facts["speccache"]["policy"] == "speccache"


def assert_streamed(chunks: list[AIMessageChunk]) -> None:
    assert [chunk.text for chunk in chunks] == ["The ", "answer", ".", ""]
    assert [chunk.usage_metadata for chunk in chunks[:-1]] == [None] * 3
    assert [chunk.chunk_position for chunk in chunks] == [None, None, None, "last"]
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert_whole(total)


# The six calls.


def test_invoke(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    assert_whole(llm.invoke(QUESTION))
    assert runtime.calls == [(TURNS, {"temperature": 0.0})]


async def test_ainvoke_in_a_running_loop(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    assert_whole(await llm.ainvoke(QUESTION))
    assert runtime.calls == [(TURNS, {"temperature": 0.0})]


def test_stream(llm: ChatSpecCache) -> None:
    handler = Tokens()
    assert_streamed(list(llm.stream(QUESTION, {"callbacks": [handler]})))
    assert handler.tokens == ["The ", "answer", ".", ""]
    assert len(handler.ends) == 1


async def test_astream_in_a_running_loop(llm: ChatSpecCache) -> None:
    handler = Tokens()
    assert_streamed([chunk async for chunk in llm.astream(QUESTION, {"callbacks": [handler]})])
    assert handler.tokens == ["The ", "answer", ".", ""]


@pytest.mark.parametrize("method", ["agenerate", "astream"])
async def test_asynchronous_calls_take_the_runtimes_asynchronous_methods(
    llm: ChatSpecCache, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for name in ("generate", "stream"):
        monkeypatch.setattr(type(llm), f"_{name}", lambda *_, **__: pytest.fail("a synchronous method was called"))
    assert_whole(await llm.ainvoke(QUESTION))
    assert "".join([chunk.text async for chunk in llm.astream(QUESTION)]) == ANSWER


def test_batch_and_abatch(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    assert [message.text for message in llm.batch(["one", "two"])] == [ANSWER] * 2
    assert [message.text for message in asyncio.run(llm.abatch(["three", "four"]))] == [ANSWER] * 2
    asked = {prompt[0]["content"] for prompt, _ in runtime.calls}
    assert asked == {"one", "two", "three", "four"}


def test_streaming_is_lazy(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    stream = llm.stream(QUESTION)
    assert runtime.calls == []
    assert next(stream).text == "The "
    assert len(runtime.calls) == 1


def test_leaving_a_stream_early_frees_the_request(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    stream = llm.stream(QUESTION)
    next(stream)
    assert runtime.running == 1
    stream.close()
    assert runtime.running == 0


async def test_leaving_an_async_stream_early_frees_the_request(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    stream = llm.astream(QUESTION)
    await anext(stream)
    assert runtime.running == 1
    await stream.aclose()
    await asyncio.sleep(0.05)  # LangChain drops the inner stream, and the event loop then closes it
    assert runtime.running == 0


def test_streaming_true_streams_behind_invoke(runtime: FakeRuntime) -> None:
    handler = Tokens()
    assert_whole(ChatSpecCache(runtime=runtime, streaming=True).invoke(QUESTION, {"callbacks": [handler]}))
    assert len(handler.tokens) == 4
    ChatSpecCache(runtime=runtime).invoke(QUESTION, {"callbacks": [handler]})
    assert len(handler.tokens) == 4


# What an answer says.


def answering(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    completion = Completion(ANSWER, PrefillReport(prompt_tokens=9), Usage(9, 2, cached_tokens=7), "length", **facts)
    deltas = [Delta(ANSWER), Delta("", completion)]
    monkeypatch.setattr(runtime, "generate", lambda *_, **__: completion)
    monkeypatch.setattr(runtime, "stream", lambda *_, **__: (delta for delta in deltas))


def test_reused_tokens_are_cache_read(
    llm: ChatSpecCache, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(runtime, monkeypatch)
    counter = UsageMetadataCallbackHandler()
    message = llm.invoke(QUESTION, {"callbacks": [counter]})
    *_, last = llm.stream(QUESTION)
    expected = {
        "input_tokens": 9,
        "output_tokens": 2,
        "total_tokens": 11,
        "input_token_details": {"cache_read": 7},
    }
    assert message.usage_metadata == last.usage_metadata == counter.usage_metadata["tiny"] == expected
    assert message.response_metadata["finish_reason"] == "length"
    assert "logprobs" not in message.response_metadata


def test_logprobs_name_their_tokens(
    llm: ChatSpecCache, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    chosen, other = tokenizer.encode("K"), tokenizer.encode("ü", add_special_tokens=False)
    answering(runtime, monkeypatch, logprobs=[{chosen[0]: -0.5, other[0]: -1.5}])
    [step] = llm.invoke(QUESTION, logprobs=2).response_metadata["logprobs"]["content"]
    assert (step["token"], step["bytes"], step["logprob"]) == ("K", [75], -0.5)
    assert [top["logprob"] for top in step["top_logprobs"]] == [-0.5, -1.5]


# What reaches the runtime.


def params_of(runtime: FakeRuntime) -> dict[str, Any]:
    return runtime.calls[-1][1]


def test_arguments_of_a_call_win_over_the_models_own(runtime: FakeRuntime) -> None:
    llm = ChatSpecCache(runtime=runtime, max_tokens=9, model_kwargs={"seed": 1, "top_p": 0.5})
    bound = llm.bind(seed=2, policy="full_reuse", max_tokens=4)
    bound.invoke("Why?", max_tokens=3, recompute_ratio=0.5, scoring="online", temperature=None)
    assert params_of(runtime) == {
        "temperature": 0.0,
        "max_tokens": 3,
        "top_p": 0.5,
        "seed": 2,
        "policy": "full_reuse",
        "recompute_ratio": 0.5,
        "scoring": "online",
    }


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_stop_is_taken_at_construction_in_bind_and_in_a_call(runtime: FakeRuntime, name: str) -> None:
    llm = ChatSpecCache(runtime=runtime, **{name: ["END"]})
    llm.invoke("Why?")
    list(llm.stream("Why?", stop=None))
    llm.bind(stop=["FIN"]).invoke("Why?")
    llm.bind(stop=["FIN"]).invoke("Why?", stop=["."])
    llm.invoke("Why?", stop=[])
    assert [params.get("stop") for _, params in runtime.calls] == [["END"], ["END"], ["FIN"], ["."], []]


@pytest.mark.parametrize("call", ["invoke", "stream", "ainvoke", "astream"])
def test_a_call_for_another_model_is_refused(llm: ChatSpecCache, runtime: FakeRuntime, call: str) -> None:
    async def drained(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    def ask(model: str) -> Any:
        result = getattr(llm, call)("Why?", model=model)
        if call == "stream":
            return list(result)
        return asyncio.run(drained(result) if call == "astream" else result) if call[0] == "a" else result

    assert ask("tiny")
    assert "model" not in params_of(runtime)
    with pytest.raises(ConfigurationError, match="asks for model 'large'; this ChatSpecCache serves 'tiny'"):
        ask("large")
    assert len(runtime.calls) == 1


async def test_no_event_loop_waits_for_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    runtime = LoadingRuntime(tokenizer=tokenizer)
    llm = ChatSpecCache(runtime=runtime)
    await llm.ainvoke("Why?")
    _ = [chunk async for chunk in llm.astream("Why?")]
    assert threading.get_ident() not in runtime.asked


@pytest.mark.parametrize("method", ["warm", "prefetch"])
def test_one_text_is_not_taken_for_a_list_of_letters(
    llm: ChatSpecCache, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(runtime, method, lambda texts, **_: given.append(texts))
    getattr(llm, method)("a text")
    assert given == ["a text"]  # which `SpecCache` refuses


def test_warm_takes_documents_and_texts(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    report = llm.warm([Document("a chunk", metadata={"file": "a.md"}), "a text"], show_progress=False)
    assert runtime.warmed == ["a chunk", "a text"]
    assert report.n_texts == 2


def test_tokens_are_the_target_models(llm: ChatSpecCache, tokenizer: PreTrainedTokenizerFast) -> None:
    assert llm.get_token_ids("Zürich") == tokenizer.encode("Zürich")
    assert llm.get_num_tokens("Zürich") == len(tokenizer.encode("Zürich"))


# What LangChain traces and caches.


def test_tracing_params(runtime: FakeRuntime) -> None:
    class Ours(ChatSpecCache):
        pass

    params = Ours(runtime=runtime, stop=["x"])._get_ls_params()
    assert params == {
        "ls_provider": "speccache",
        "ls_model_type": "chat",
        "ls_model_name": "tiny",
        "ls_temperature": 0.0,
        "ls_stop": ["x"],
    }
    assert ChatSpecCache(runtime=runtime)._get_ls_params(model="large")["ls_model_name"] == "large"


def test_traces_hold_no_engine_options() -> None:
    llm = ChatSpecCache(model="tiny", engine_options={"hf_token": "hunter2"})
    assert "hunter2" not in f"{llm!r} {llm._serialized} {llm._get_invocation_params()}"
    assert "hunter2" not in dumps(llm)


@pytest.mark.parametrize("make", [ChatSpecCache, SpecCacheCompletion])
def test_langchain_writes_a_model_down_and_reads_it_again(make: Any) -> None:
    llm = make(
        model="org/model",
        store="~/kv",
        recompute_ratio=0.3,
        engine_options={"max_model_len": 512},
        max_tokens=9,
        stop=["x"],
        model_kwargs={"top_k": 3},
    )
    again = loads(dumps(llm), valid_namespaces=["langchain_speccache"], allowed_objects=[make])
    assert type(again) is make
    assert again.config == llm.config
    assert again.dict() == llm.dict()


def test_a_cache_tells_models_apart_by_what_shapes_an_answer(runtime: FakeRuntime) -> None:
    cache = InMemoryCache()
    for options in ({}, {}, {"stop": ["x"]}, {"temperature": 0.5}, {"model_kwargs": {"seed": 1}}):
        ChatSpecCache(runtime=runtime, cache=cache, **options).invoke("Why?")
    assert len(runtime.calls) == 4
    ChatSpecCache(runtime=FakeRuntime(SpecCacheConfig(model="large"), tokenizer=runtime.tokenizer), cache=cache).invoke(
        "Why?"
    )
    assert len(cache._cache) == 5


def test_identifying_params_name_all_that_an_answer_depends_on() -> None:
    def params(**options: Any) -> str:
        return repr(ChatSpecCache(model="tiny", **options)._identifying_params)

    others: list[dict[str, Any]] = [
        {"engine": "transformers"},
        {"anchor": "Read:"},
        {"tenant": "t"},
        {"engine_options": {"dtype": "float32"}},
        {"engine_options": {"quantization": "fp8"}},
        {"policy": "full_reuse"},
    ]
    assert len({params(), *(params(**other) for other in others)}) == 1 + len(others)
    assert params(store="kv", ram_bytes=5) == params()  # where KV lies changes no answer


# Construction and copies.


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[SpecCacheConfig]]:
    """Configurations that the process's own runtime was asked for."""
    asked: list[SpecCacheConfig] = []
    runtime = FakeRuntime(tokenizer=tokenizer)
    monkeypatch.setattr(SpecCache, "shared", lambda config: asked.append(config) or runtime)
    yield asked


def test_the_shared_runtime_of_a_configuration_is_taken(shared: list[SpecCacheConfig]) -> None:
    llm = ChatSpecCache("tiny", policy="full_reuse", store=Path("kv"))
    assert shared == []  # constructing starts nothing
    assert llm.invoke("Why?").text == ANSWER
    assert set(map(id, shared)) == {id(llm.config)}
    assert (llm.model, llm.config.policy, llm.config.store) == ("tiny", "full_reuse", "kv")


def test_options_of_remote_models_are_taken_and_mean_nothing() -> None:
    llm = ChatSpecCache(model="tiny", timeout=60, max_retries=2, api_key="k", base_url="http://x", streaming=True)
    assert llm.config == SpecCacheConfig(model="tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_ration": 0.2}, "unknown option 'recompute_ration'.*ChatSpecCache itself takes.*model_kwargs"),
        ({"recompute_ratio": 1.5}, "'recompute_ratio' is 1.5"),
        ({"config": SpecCacheConfig(model="other")}, "2 sources"),
        ({"runtime": FakeRuntime()}, "2 sources"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChatSpecCache(model="tiny", **options)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'model' is missing"):
        ChatSpecCache()


def test_a_configuration_may_be_given_whole() -> None:
    config = SpecCacheConfig(model="tiny", policy="full_reuse")
    assert ChatSpecCache(config=config).config == ChatSpecCache(config=config.model_dump()).config == config


def test_deep_copies_share_the_runtime(llm: ChatSpecCache, runtime: FakeRuntime) -> None:
    twin, _ = copy.deepcopy([llm, llm.config])
    assert twin is not llm
    assert twin.runtime is runtime
    assert twin.config == llm.config
    assert copy.copy(llm).runtime is runtime


def test_a_pickled_model_finds_its_processs_own_runtime(llm: ChatSpecCache, shared: list[SpecCacheConfig]) -> None:
    llm.max_tokens = 7
    found = pickle.loads(pickle.dumps(llm))
    assert (found.config, found.max_tokens) == (llm.config, 7)
    assert found.invoke("Why?").text == ANSWER
    assert shared[0] == llm.config


def test_fields_are_configurable_at_run_time(shared: list[SpecCacheConfig]) -> None:
    llm = ChatSpecCache(model="tiny").configurable_fields(max_tokens=ConfigurableField(id="length"))
    message = llm.invoke("Why?", {"configurable": {"length": 3}})
    assert message.text == ANSWER
    runtime: Any = SpecCache.shared(shared[0])
    assert runtime.calls[0][1]["max_tokens"] == 3
