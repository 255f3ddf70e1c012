"""`SpecCacheCompletion` against a scripted runtime."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.prompts import PromptTemplate

from langchain_speccache import SpecCacheCompletion
from speccache_rag.errors import ConfigurationError, PromptError
from tests.unit.fake_runtime import FakeRuntime, LoadingRuntime

ANSWER = "The answer."


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def llm(runtime: FakeRuntime) -> SpecCacheCompletion:
    return SpecCacheCompletion(runtime=runtime)


def test_prompts_go_in_as_they_are(llm: SpecCacheCompletion, runtime: FakeRuntime) -> None:
    assert (PromptTemplate.from_template("Q: {q}\nA:") | llm).invoke({"q": "Why?"}) == ANSWER
    assert runtime.calls == [("Q: Why?\nA:", {"temperature": 0.0})]


async def test_all_six_calls(llm: SpecCacheCompletion, runtime: FakeRuntime) -> None:
    assert await llm.ainvoke("1") == ANSWER
    assert list(llm.stream("2")) == ["The ", "answer", ".", ""]
    assert [piece async for piece in llm.astream("3")] == ["The ", "answer", ".", ""]
    assert llm.batch(["4", "5"]) == [ANSWER] * 2
    assert await llm.abatch(["6", "7"]) == [ANSWER] * 2
    assert sorted(prompt for prompt, _ in runtime.calls) == list("1234567")
    assert llm.generate([]).generations == []


def test_a_batch_runs_at_once(llm: SpecCacheCompletion, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=5)
    monkeypatch.setattr(
        runtime, "generate", lambda *args, **kw: together.wait() and None or FakeRuntime().generate(*args)
    )
    assert llm.batch(["1", "2", "3"]) == [ANSWER] * 3


def test_answers_come_in_the_order_of_their_prompts(
    llm: SpecCacheCompletion, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "generate", lambda prompt, **_: FakeRuntime(pieces=[prompt.upper()]).generate(prompt))
    assert llm.batch(["a", "b", "c"]) == ["A", "B", "C"]


async def test_an_error_stops_the_other_prompts(
    llm: SpecCacheCompletion, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    async def agenerate(prompt: str, **_: Any) -> None:
        if prompt == "bad":
            raise PromptError("too long")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(prompt)
            raise

    monkeypatch.setattr(runtime, "agenerate", agenerate)
    with pytest.raises(PromptError, match="too long"):
        await llm.agenerate(["good", "bad", "fine"])
    assert stopped == ["good", "fine"]


async def test_no_event_loop_waits_for_the_tokenizer() -> None:
    runtime = LoadingRuntime()
    llm = SpecCacheCompletion(runtime=runtime)
    await llm.ainvoke("Why?")
    _ = [chunk async for chunk in llm.astream("Why?")]
    assert threading.get_ident() not in runtime.asked


def test_generations_carry_usage_and_report(llm: SpecCacheCompletion) -> None:
    [[generation]] = llm.generate(["Why?"]).generations
    info = generation.generation_info
    assert (info["usage"]["output_tokens"], info["usage"]["input_token_details"]) == (3, {"cache_read": 0})
    assert (info["model_name"], info["finish_reason"], info["speccache"]["policy"]) == ("tiny", "stop", "speccache")


def test_arguments_of_a_call_win(runtime: FakeRuntime) -> None:
    llm = SpecCacheCompletion(runtime=runtime, stop=["\n\n"], model_kwargs={"seed": 1})
    llm.bind(policy="full_reuse", max_tokens=3).invoke("Why?")
    llm.invoke("Why?", stop=["."], model="tiny")
    assert [params for _, params in runtime.calls] == [
        {"temperature": 0.0, "max_tokens": 3, "seed": 1, "stop": ["\n\n"], "policy": "full_reuse"},
        {"temperature": 0.0, "seed": 1, "stop": ["."]},
    ]
    with pytest.raises(ConfigurationError, match="asks for model 'large'"):
        llm.invoke("Why?", model="large")


def test_leaving_a_stream_early_frees_the_request(llm: SpecCacheCompletion, runtime: FakeRuntime) -> None:
    stream = llm.stream("Why?")
    next(stream)
    assert runtime.running == 1
    stream.close()
    assert runtime.running == 0


def test_construction_copies_and_traces_are_the_chat_models(runtime: FakeRuntime, llm: SpecCacheCompletion) -> None:
    params: Any = llm._get_ls_params(stop=["x"])
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("speccache", "tiny", ["x"])
    assert copy.deepcopy(llm).runtime is runtime
    with pytest.raises(ConfigurationError, match="unknown option 'tempratur'.*SpecCacheCompletion itself takes"):
        SpecCacheCompletion("tiny", tempratur=0.2)
