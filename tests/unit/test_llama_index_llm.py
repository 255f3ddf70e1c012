"""`SpecCacheLLM` against a scripted runtime: what LlamaIndex sees, and what the runtime is asked."""

from __future__ import annotations

import asyncio
import copy
import importlib
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import MockEmbedding, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.speccache import SpecCacheLLM, anchor_for
from transformers import PreTrainedTokenizerFast

from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, PromptError
from speccache_rag.prompt.tokenizer import PromptTokenizer
from speccache_rag.runtime import SpecCache
from tests.tiny import tiny_tokenizer
from tests.unit.fake_runtime import FakeRuntime, LoadingRuntime

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Why?")]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
ANSWER = "The answer."
CHUNK = 'First line, {with: "braces"} & <tags>.\n\tSecond line, 東京.'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def llm(runtime: FakeRuntime) -> SpecCacheLLM:
    return SpecCacheLLM(runtime=runtime)


class EndEvents(BaseEventHandler):
    """Collects the end events of LLM calls."""

    seen: list[Any] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.seen.append(event)


@pytest.fixture
def end_events() -> Any:
    handler = EndEvents(seen=[])
    handlers = get_dispatcher().event_handlers
    handlers.append(handler)
    yield handler.seen
    handlers.remove(handler)


def assert_whole(response: Any) -> None:
    assert response.raw["usage"]["completion_tokens"] == 3
    assert response.raw["usage"]["total_tokens"] == response.raw["usage"]["prompt_tokens"] + 3
    assert response.raw["speccache"]["policy"] == "speccache"
    assert response.additional_kwargs == response.raw["usage"]


def assert_streamed(responses: list[Any], texts: list[str]) -> None:
    assert texts == ["The ", "The answer", ANSWER, ANSWER]
    assert "".join(r.delta for r in responses) == ANSWER
    assert all(r.raw is None for r in responses[:-1])
    assert_whole(responses[-1])


# The eight endpoints.


def test_chat(llm: SpecCacheLLM, runtime: FakeRuntime, end_events: list[Any]) -> None:
    response = llm.chat(QUESTION)
    assert response.message.content == ANSWER
    assert response.message.role == "assistant"
    assert_whole(response)
    assert runtime.calls == [(TURNS, {"temperature": 0.0})]
    assert len(end_events) == 1


def test_stream_chat(llm: SpecCacheLLM, end_events: list[Any]) -> None:
    responses = list(llm.stream_chat(QUESTION))
    assert_streamed(responses, [r.message.content for r in responses])
    assert len(end_events) == 1


async def test_achat_in_a_running_loop(llm: SpecCacheLLM, runtime: FakeRuntime, end_events: list[Any]) -> None:
    response = await llm.achat(QUESTION)
    assert response.message.content == ANSWER
    assert_whole(response)
    assert runtime.calls[0][0] == TURNS
    assert len(end_events) == 1


async def test_astream_chat_in_a_running_loop(llm: SpecCacheLLM, end_events: list[Any]) -> None:
    responses = [r async for r in await llm.astream_chat(QUESTION)]
    assert_streamed(responses, [r.message.content for r in responses])
    assert len(end_events) == 1


def test_complete(llm: SpecCacheLLM, runtime: FakeRuntime, end_events: list[Any]) -> None:
    response = llm.complete("Why?")
    assert response.text == ANSWER
    assert_whole(response)
    assert runtime.calls[0][0] == [{"role": "user", "content": "Why?"}]
    assert len(end_events) == 1


def test_stream_complete(llm: SpecCacheLLM, end_events: list[Any]) -> None:
    responses = list(llm.stream_complete("Why?"))
    assert_streamed(responses, [r.text for r in responses])
    assert len(end_events) == 1


async def test_acomplete_in_a_running_loop(llm: SpecCacheLLM, end_events: list[Any]) -> None:
    response = await llm.acomplete("Why?")
    assert response.text == ANSWER
    assert_whole(response)
    assert len(end_events) == 1


async def test_astream_complete_in_a_running_loop(llm: SpecCacheLLM, end_events: list[Any]) -> None:
    responses = [r async for r in await llm.astream_complete("Why?")]
    assert_streamed(responses, [r.text for r in responses])
    assert len(end_events) == 1


def test_streaming_is_lazy(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    stream = llm.stream_chat(QUESTION)
    assert runtime.calls == []
    assert next(stream).delta == "The "
    assert len(runtime.calls) == 1


def test_leaving_a_stream_early_frees_the_request(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    stream = llm.stream_complete("Why?")
    next(stream)
    assert runtime.running == 1
    stream.close()
    assert runtime.running == 0


async def test_leaving_an_async_stream_early_frees_the_request(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    stream = await llm.astream_complete("Why?")
    await anext(stream)
    assert runtime.running == 1
    await stream.aclose()
    await asyncio.sleep(0.05)  # LlamaIndex drops the inner stream, and the event loop then closes it
    assert runtime.running == 0


def test_callback_manager_sees_one_call(runtime: FakeRuntime) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    SpecCacheLLM(runtime=runtime, callback_manager=CallbackManager([debug])).chat(QUESTION)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1


# What reaches the runtime.


def test_a_formatted_prompt_goes_in_as_it_is(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    llm.complete("<|im_start|>user\nWhy?", formatted=True)
    assert runtime.calls[0][0] == "<|im_start|>user\nWhy?"


def test_a_model_without_chat_template_gets_text(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    runtime.tokenizer.chat_template = None
    assert not llm.metadata.is_chat_model
    llm.complete("Why?")
    llm.chat(QUESTION)
    assert [prompt for prompt, _ in runtime.calls] == ["Why?", "system: Be brief.\nuser: Why?\nassistant: "]


def test_arguments_of_a_call_win_over_the_llms_own(runtime: FakeRuntime) -> None:
    llm = SpecCacheLLM(runtime=runtime, max_tokens=9, stop=["END"], additional_kwargs={"seed": 1, "top_p": 0.5})
    llm.complete("Why?", max_tokens=3, seed=2, policy="full_reuse", recompute_ratio=0.5, scoring="online", stop=None)
    assert runtime.calls[0][1] == {
        "temperature": 0.0,
        "max_tokens": 3,
        "stop": ["END"],
        "top_p": 0.5,
        "seed": 2,
        "policy": "full_reuse",
        "recompute_ratio": 0.5,
        "scoring": "online",
    }


def test_none_is_not_given_and_an_empty_list_is(runtime: FakeRuntime) -> None:
    llm = SpecCacheLLM(runtime=runtime, stop=["END"], additional_kwargs={"seed": None, "stop": None})
    llm.complete("Why?", temperature=None, max_tokens=None, stop=None, policy=None)
    llm.complete("Why?", stop=[])
    llm.complete("Why?", stop=["\n"])
    llm.with_options(stop=None).complete("Why?")
    own = {"temperature": 0.0}
    stops: list[dict[str, Any]] = [{"stop": ["END"]}, {"stop": []}, {"stop": ["\n"]}, {}]
    assert [params for _, params in runtime.calls] == [own | stop for stop in stops]


@pytest.mark.parametrize("endpoint", ["chat", "complete", "stream_chat", "stream_complete"])
def test_logprobs_are_in_the_response(tokenizer: PreTrainedTokenizerFast, endpoint: str) -> None:
    runtime = FakeRuntime(tokenizer=tokenizer)
    [chosen], [other] = tokenizer.encode("K"), tokenizer.encode("b")
    rocket = tokenizer.encode("🚀")  # a token a byte, none of which is a character
    runtime.logprobs = [{chosen: -0.1, other: -2.5}, *({token_id: -0.2} for token_id in rocket)]
    question: Any = QUESTION if "chat" in endpoint else "Why?"
    response = getattr(SpecCacheLLM(runtime=runtime), endpoint)(question, logprobs=1)
    if "stream" in endpoint:
        *partial, response = response
        assert [r.logprobs for r in partial] == [None] * 3
    found = [[(entry.token, entry.logprob) for entry in step] for step in response.logprobs]
    assert found[0] == [("K", -0.1), ("b", -2.5)]
    assert bytes(byte for step in response.logprobs for byte in step[0].bytes).decode() == "K🚀"
    assert runtime.calls[0][1]["logprobs"] == 1


def test_no_logprobs_where_none_were_asked_for(llm: SpecCacheLLM) -> None:
    assert llm.chat(QUESTION).logprobs is None


def test_text_blocks_are_joined_and_others_refused(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="one"), TextBlock(text="two")])])
    assert runtime.calls[0][0] == [{"role": "user", "content": "one\ntwo"}]
    with pytest.raises(PromptError, match="^A user message holds a ImageBlock"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="one"), ImageBlock(image=b"0")])])
    assert len(runtime.calls) == 1


def test_with_options_shares_the_runtime(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    plain = llm.with_options(policy="full_recompute", max_tokens=8)
    assert plain.runtime is runtime
    plain.complete("Why?")
    llm.complete("Why?")
    assert [params.get("policy") for _, params in runtime.calls] == ["full_recompute", None]
    assert [params.get("max_tokens") for _, params in runtime.calls] == [8, None]


def test_warm_takes_bare_node_texts(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    report = llm.warm([TextNode(text="a chunk", metadata={"file": "a.md"}), "a text"], show_progress=False)
    assert runtime.warmed == ["a chunk", "a text"]
    assert report.n_texts == 2


def test_prefetch_takes_what_retrievers_return(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    node = TextNode(text="a chunk", metadata={"file": "a.md"})
    llm.prefetch([node, NodeWithScore(node=node, score=0.5), "a text"])
    assert runtime.prefetched == ["a chunk", "a chunk", "a text"]


@pytest.mark.parametrize("method", ["warm", "prefetch"])
def test_one_text_is_not_taken_for_a_list_of_letters(
    llm: SpecCacheLLM, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(runtime, method, lambda texts, **_: given.append(texts))
    getattr(llm, method)("a text")
    assert given == ["a text"]  # which `SpecCache` refuses


async def test_no_event_loop_waits_for_tokenizer_or_engine() -> None:
    runtime = LoadingRuntime()
    llm = SpecCacheLLM(runtime=runtime)
    await llm.achat(QUESTION)
    await llm.acomplete("Why?")
    _ = [response async for response in await llm.astream_chat(QUESTION)]
    _ = [response async for response in await llm.astream_complete("Why?")]
    assert len(runtime.calls) == 4
    assert runtime.asked != []
    assert threading.get_ident() not in runtime.asked


def test_a_template_without_system_turn_shows_it_all_the_same(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refusing + tokenizer.chat_template
    runtime = FakeRuntime(tokenizer=tokenizer)
    SpecCacheLLM(runtime=runtime).chat(QUESTION)
    prompt = PromptTokenizer(tokenizer).render(runtime.calls[0][0]).text
    assert prompt == "<|im_start|>user\nBe brief.\n\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert anchor_for(tokenizer).startswith("<|im_start|>user\nYou are an expert Q&A system")


def test_the_repr_holds_no_engine_options() -> None:
    llm = SpecCacheLLM(model="tiny", engine_options={"hf_token": "secret"})
    assert "secret" not in f"{llm!r} {llm}"


async def test_an_agent_that_needs_function_calling_says_so(llm: SpecCacheLLM) -> None:
    with pytest.raises(ValueError, match="must be a FunctionCallingLLM"):
        await FunctionAgent(tools=[], llm=llm).run("Why?")


def test_metadata(llm: SpecCacheLLM) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (4096, 256, "tiny")
    assert metadata.is_chat_model
    assert not metadata.is_function_calling_model


# Pipelines.


def nodes() -> list[TextNode]:
    return [TextNode(text=f"  {CHUNK} Number {i}.\n", metadata={"file": f"{i}.md"}) for i in range(3)]


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
def test_chunks_reach_the_prompt_verbatim(llm: SpecCacheLLM, runtime: FakeRuntime, mode: str) -> None:
    response = SummaryIndex(nodes()).as_query_engine(llm=llm, response_mode=mode).query("Why?")
    assert ANSWER in str(response)
    prompts = "".join(turn["content"] for prompt, _ in runtime.calls for turn in prompt)
    assert all(f"{CHUNK} Number {i}." in prompts for i in range(3))


async def test_a_vector_index_answers_in_a_running_loop(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    index = VectorStoreIndex(nodes(), embed_model=MockEmbedding(8))
    response = await index.as_query_engine(llm=llm, similarity_top_k=3).aquery("Why?")
    assert str(response) == ANSWER
    [(prompt, _)] = runtime.calls
    assert all(f"{CHUNK} Number {i}." in prompt[-1]["content"] for i in range(3))


def test_a_query_engine_streams(llm: SpecCacheLLM) -> None:
    engine = SummaryIndex(nodes()).as_query_engine(llm=llm, streaming=True)
    assert "".join(engine.query("Why?").response_gen) == ANSWER


# Construction, copies, serialization.


def test_the_shared_runtime_of_a_configuration_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = FakeRuntime()
    asked = []
    monkeypatch.setattr(SpecCache, "shared", lambda config: asked.append(config) or shared)
    llm = SpecCacheLLM("tiny", policy="full_reuse", store=Path("kv"))
    assert asked == []  # constructing starts nothing
    assert llm.complete("Why?").text == ANSWER
    assert set(map(id, asked)) == {id(llm.config)}
    assert (llm.config.model, llm.config.policy, llm.config.store) == ("tiny", "full_reuse", "kv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_ration": 0.2}, "unknown option 'recompute_ration'"),
        ({"recompute_ratio": 1.5}, "'recompute_ratio' is 1.5"),
        ({"scoring": "sometimes"}, "'scoring' is 'sometimes'"),
        ({"config": SpecCacheConfig(model="other")}, "2 sources"),
        ({"runtime": FakeRuntime()}, "2 sources"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SpecCacheLLM(model="tiny", **options)


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'model' is missing.*temperature"):
        SpecCacheLLM()


def test_deep_copies_share_the_runtime(llm: SpecCacheLLM, runtime: FakeRuntime) -> None:
    twin, _ = copy.deepcopy([llm, llm.config])
    assert twin is not llm
    assert twin.runtime is runtime
    assert twin.config == llm.config
    assert copy.copy(llm).runtime is runtime


def described() -> SpecCacheLLM:
    return SpecCacheLLM(
        model="tiny", recompute_ratio=0.3, temperature=0.7, max_tokens=7, stop=["x"], additional_kwargs={"seed": 3}
    )


def test_dict_round_trip() -> None:
    data = described().to_dict()
    assert data["class_name"] == "SpecCacheLLM"
    assert SpecCacheLLM.from_dict(data).to_dict() == data
    assert SpecCacheLLM.from_json(described().to_json()).config == described().config


def test_pickle_round_trip() -> None:
    assert pickle.loads(pickle.dumps(described())).to_dict() == described().to_dict()


def test_a_live_runtime_is_not_pickled_but_found_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = SpecCacheLLM(runtime=FakeRuntime(SpecCacheConfig(model="tiny", tenant="t")), max_tokens=7)
    llm._runtime.lock = threading.Lock()  # as a real one: it cannot be pickled
    data = pickle.dumps(llm)
    shared = FakeRuntime()
    monkeypatch.setattr(SpecCache, "shared", lambda config: shared if config == llm.config else None)
    twin = pickle.loads(data)
    assert twin.runtime is shared
    assert twin.to_dict() == llm.to_dict()
    assert llm.runtime is not shared  # pickling took nothing away
    assert caplog.records == []


# The anchor.


def test_the_anchor_is_the_start_of_the_query_engines_prompt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    runtime = FakeRuntime(tokenizer=tokenizer)
    SummaryIndex(nodes()).as_query_engine(llm=SpecCacheLLM(runtime=runtime)).query("Why?")
    prompt = tokenizer.apply_chat_template(runtime.calls[0][0], tokenize=False, add_generation_prompt=True)
    anchor = anchor_for(tokenizer)
    assert anchor.startswith("<|im_start|>system\n")
    assert prompt.startswith(f"{anchor}file: 0.md")


def test_the_anchor_without_chat_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.chat_template = None
    assert anchor_for(tokenizer, PromptTemplate("Read: {context_str}\nAnswer: {query_str}")) == "Read: "


def test_a_template_without_context_has_no_anchor(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="does not place the retrieved context"):
        anchor_for(tiny_tokenizer(tmp_path), PromptTemplate("Answer: {query_str}"))


def test_a_missing_llama_index_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_index.llms.speccache")
    monkeypatch.setitem(sys.modules, "llama_index.core", None)
    with pytest.raises(ImportError, match=r'pip install "speccache-rag\[llama-index\]"'):
        importlib.import_module("llama_index.llms.speccache")


def test_the_namespace_packages_stay_namespaces() -> None:
    folder = ROOT / "integrations" / "llama_index"
    assert not (folder / "__init__.py").exists()
    assert not (folder / "llms" / "__init__.py").exists()
