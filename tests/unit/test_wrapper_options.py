"""Options as users of other wrappers give them: both frameworks take the same ones, and the engine is asked alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")
pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from langchain_core.messages import HumanMessage
from llama_index.llms.speccache import SpecCacheLLM

from langchain_speccache import ChatSpecCache, SpecCacheCompletion
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, PromptError
from speccache_rag.spellings import AnswerCut
from tests.unit.fake_runtime import FakeRuntime

MODELS = [ChatSpecCache, SpecCacheCompletion, SpecCacheLLM]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda cls: cls.__name__)


def ask(llm: Any, **options: Any) -> Any:
    return llm.complete("Why?", **options) if isinstance(llm, SpecCacheLLM) else llm.invoke("Why?", **options)


def asked(make: Callable[..., Any], given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What the runtime is asked by a model made with `given`, called with `options`."""
    runtime = FakeRuntime()
    ask(make(runtime=runtime, **given), **options)
    [(_, params)] = runtime.calls
    return params


GREEDY = {"temperature": 0.0}
SPELLINGS = [
    ({"max_tokens": None}, {}),
    ({"max_tokens": -1}, {}),
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"temperature": None}, {}),
    ({"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}),
    ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_sequences": ["a"]}, {"stop": ["a"]}),
    ({"timeout": 3.5}, {"timeout": 3.5}),
    ({"request_timeout": 3.5}, {"timeout": 3.5}),
    ({"max_retries": 2, "api_key": "x", "api_base": "y", "base_url": "z"}, {}),
    ({"n": 1}, {}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": False}, {}),
]


@every_model
@pytest.mark.parametrize(("given", "expected"), SPELLINGS, ids=lambda value: str(value))
def test_a_constructor_takes_them(make: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(make, given) == GREEDY | expected


@every_model
@pytest.mark.parametrize(("given", "expected"), SPELLINGS, ids=lambda value: str(value))
def test_a_call_takes_them(make: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert asked(make, {}, **given) == GREEDY | expected


SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}}}


@every_model
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object"}, {"structured_outputs": {"json_object": True}}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            {"structured_outputs": {"json": SCHEMA}},
        ),
        ({"type": "text"}, {}),
    ],
)
def test_openais_json_mode_is_guided_decoding(make: Any, form: Any, expected: dict[str, Any]) -> None:
    assert asked(make, {}, response_format=form) == GREEDY | expected
    with pytest.raises(ConfigurationError, match="response_format is 'json'"):
        asked(make, {}, response_format="json")


@every_model
def test_one_stop_text_is_a_list_of_one(make: Any) -> None:
    assert asked(make, {"stop": "\n"})["stop"] == ["\n"]
    assert asked(make, {"stop_sequences": "\n"})["stop"] == ["\n"]


@every_model
def test_a_call_wins_under_any_spelling(make: Any) -> None:
    assert asked(make, {"max_tokens": 5}, max_new_tokens=9)["max_tokens"] == 9


@every_model
def test_one_option_under_two_names_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_new_tokens and max_tokens are the same option"):
        make(model="tiny", max_tokens=5, max_new_tokens=9)


@every_model
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("top_p", 2),
        ("stop", 3),
        ("timeout", 0),
        ("seed", "x"),
    ],
)
def test_a_value_out_of_range_is_our_error(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"option '{name}' is {value!r}"):
        make(model="tiny", **{name: value})


@every_model
def test_an_unknown_option_is_told_where_sampling_options_go(make: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(model="tiny", best_of=3)
    assert "unknown option 'best_of'" in caught.value.message
    place = "additional_kwargs" if make is SpecCacheLLM else "model_kwargs"
    assert f"other sampling options go into {place}=" in caught.value.hint
    assert "callbacks" not in str(caught.value)  # nothing of the frameworks' own


@every_model
def test_the_context_window_is_the_engines(make: Any) -> None:
    assert make(model="tiny", context_window=2048).config.engine_options == {"max_model_len": 2048}
    assert make(model_name="tiny").config.model == "tiny"
    with pytest.raises(ConfigurationError, match="context_window and"):
        make(model="tiny", context_window=2048, engine_options={"max_model_len": 4096})


@every_model
@pytest.mark.parametrize("place", ["object", "call"])
def test_template_variables_reach_the_runtime(make: Any, place: str) -> None:
    off = {"enable_thinking": False}
    if place == "object":
        assert make(model="tiny", chat_template_kwargs=off).config.chat_template_kwargs == off
    else:
        assert asked(make, {}, chat_template_kwargs=off)["chat_template_kwargs"] == off


# Several answers.


@pytest.mark.parametrize("make", [ChatSpecCache, SpecCacheCompletion])
def test_several_answers_are_several_requests(make: Any) -> None:
    runtime = FakeRuntime()
    result = make(runtime=runtime, n=3, seed=5).generate(
        [[HumanMessage("Why?")]] if make is ChatSpecCache else ["Why?"]
    )
    assert [generation.text for generation in result.generations[0]] == ["The answer."] * 3
    assert sorted(params["seed"] for _, params in runtime.calls) == [5, 6, 7]


@pytest.mark.parametrize("make", [ChatSpecCache, SpecCacheCompletion])
async def test_several_answers_of_an_event_loop(make: Any) -> None:
    runtime = FakeRuntime()
    prompts = [[HumanMessage("Why?")], [HumanMessage("Who?")]] if make is ChatSpecCache else ["Why?", "Who?"]
    result = await make(runtime=runtime, n=2).agenerate(prompts)
    assert [len(answers) for answers in result.generations] == [2, 2]
    assert len(runtime.calls) == 4


@every_model
def test_what_gives_one_answer_says_so(make: Any) -> None:
    llm = make(runtime=FakeRuntime())
    with pytest.raises(ConfigurationError, match="n is 2"):
        llm.complete("Why?", n=2) if make is SpecCacheLLM else list(llm.stream("Why?", n=2))


# Answers that were cut.


@every_model
def test_a_cut_answer_warns_once(make: Any) -> None:
    llm = make(runtime=FakeRuntime(finish_reason="length"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", AnswerCut)
        for _ in range(3):
            ask(llm)
    assert [warning.category for warning in told] == [AnswerCut]
    assert "max_tokens" in str(told[0].message)


@every_model
def test_a_whole_answer_does_not(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnswerCut)
        ask(make(runtime=FakeRuntime()))


def test_errors_of_messages_are_in_good_english() -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock

    with pytest.raises(PromptError, match="^An assistant message holds a ImageBlock"):
        SpecCacheLLM(runtime=FakeRuntime()).chat([ChatMessage(role="assistant", blocks=[ImageBlock(image=b"0")])])


def test_a_whole_config_leaves_the_callers_options_alone() -> None:
    config = SpecCacheConfig(model="tiny")
    assert ChatSpecCache(config=config, max_new_tokens=3).max_tokens == 3
