"""The Transformers engine apart from the laws of reuse: options, sampling, streaming, what it refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    SmolLM3Config,
    T5Config,
)

from speccache_rag.engines.base import EngineDelta
from speccache_rag.engines.reuse import selfcheck as proofs
from speccache_rag.engines.reuse.plan import ReusePlan
from speccache_rag.engines.transformers import model as model_module
from speccache_rag.engines.transformers import support
from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.engines.transformers.options import checked, resolve_device
from speccache_rag.engines.transformers.sampling import Sampler, SamplingOptions
from speccache_rag.engines.transformers.selfcheck import self_check
from speccache_rag.engines.transformers.support import check_config
from speccache_rag.engines.transformers.text import AnswerText
from speccache_rag.errors import (
    ConfigurationError,
    ContextOverflow,
    EngineClosed,
    EngineStartError,
    PromptError,
    SelfCheckFailed,
    UnsupportedModel,
)
from tests.tiny import SIZES, _randomize, tiny_model, tiny_tokenizer

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
RAM = {"path": None, "ram_bytes": 1 << 24}


Request = tuple[ReusePlan, dict[str, Any]]


def request(n: int = 20, **sampling: Any) -> Request:
    ids = tuple(np.random.default_rng(0).integers(3, 600, n).tolist())
    return ReusePlan(ids), {"temperature": 0.0, "ignore_eos": True, **sampling}


def started(folder: Path, use: Callable[[TransformersEngine], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        engine = TransformersEngine(folder, {**OPTIONS, **options}, RAM)
        await engine.start()
        try:
            return await use(engine)
        finally:
            engine.close()

    return asyncio.run(run())


async def answer(engine: TransformersEngine, wanted: Request) -> list[EngineDelta]:
    return [delta async for delta in engine.generate(*wanted)]


def text_of(deltas: list[EngineDelta]) -> str:
    return "".join(d.text for d in deltas)


# The process.


def test_a_program_that_never_closes_ends_cleanly(tiny_folder: Path, tmp_path: Path) -> None:
    script = f"""
        from speccache_rag import SpecCache
        sc = SpecCache(model={str(tiny_folder)!r}, speculative_model={str(tiny_folder)!r}, policy="attended",
                       engine="transformers", store={str(tmp_path)!r}, engine_options={OPTIONS!r})
        sc.warm(["The mill of Arden was built in 1892 by masons from the north."], show_progress=False)
        sc.generate("Who?", max_tokens=1)
        print("asked")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


# Without vLLM.


def test_it_needs_no_vllm(tiny_folder: Path) -> None:
    script = f"""
        import sys
        sys.modules["vllm"] = None
        from speccache_rag import SpecCache
        with SpecCache(model={str(tiny_folder)!r}, engine="transformers", policy="full_reuse", min_reuse_tokens=1,
                       engine_options={OPTIONS!r}) as sc:
            chunk = "The mill of Arden was built in 1892 by masons from the north."
            sc.warm([chunk], show_progress=False)
            done = sc.generate(f"Context: {{chunk}} When?", max_tokens=3)
            assert done.report.chunks_reused == 1 and done.report.loaded_tokens > 0, done.report
            assert all(check.ok for check in sc.doctor()), sc.doctor()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# Options.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_memory_utilization": 0.5}, "Unknown engine option 'gpu_memory_utilization'.*max_model_len"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"max_model_len": 3}, "max_model_len is 3"),
        ({"max_model_len": 99999}, "max_model_len is 99999; the model's own limit is 4096"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'"),
        ({"device": "toaster"}, "device is 'toaster'"),
        ({"device": "meta"}, "device is 'meta'"),
    ],
)
def test_a_bad_engine_option_is_named(tiny_folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        TransformersEngine(tiny_folder, options, RAM)


def test_the_best_device_is_the_default() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert resolve_device(None).type == best


def test_facts_come_before_the_start(tiny_folder: Path) -> None:
    engine = TransformersEngine(tiny_folder, {"device": "cpu"}, RAM)
    assert (engine.facts.dtype, engine.facts.max_model_len) == ("float32", 4096)
    engine.close()


def test_yarn_may_reach_beyond_the_length_in_the_config(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "yarn", max_position_embeddings=1024)
    engine = TransformersEngine(folder, {"device": "cpu"}, RAM)
    assert engine.facts.max_model_len == 4096
    engine.close()


# Sampling.


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"best_of": 3}, "Unknown sampling option 'best_of'.*temperature"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ["a", ""]}, "stop is ''"),
        ({"logprobs": -1}, "logprobs is -1"),
    ],
)
def test_a_bad_sampling_option_is_named(sampling: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        checked(SamplingOptions, "sampling", sampling)


def test_sampling_defaults_are_those_of_vllm() -> None:
    options = checked(SamplingOptions, "sampling", {"max_tokens": None, "stop": "\n"})
    assert (options.max_tokens, options.temperature, options.top_p, options.stop) == (None, 1.0, 1.0, ("\n",))


LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(n: int = 400, **sampling: Any) -> Counter[int]:
    sampler = Sampler(SamplingOptions(**{"seed": 1, **sampling}), {0})
    return Counter(sampler.choose(LOGITS, [])[0] for _ in range(n))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "min_tokens": 1}, {1}),
        ({"min_tokens": 1}, {1, 2, 3}),
    ],
)
def test_which_tokens_can_be_drawn(sampling: dict[str, Any], possible: set[int]) -> None:
    assert set(drawn(**sampling)) == possible


def test_tokens_are_drawn_by_their_probability_at_the_temperature() -> None:
    counts = drawn(4000, temperature=0.5)
    expected = torch.softmax(LOGITS / 0.5, -1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_logprobs_are_the_models_own_and_hold_the_chosen_token() -> None:
    sampler = Sampler(SamplingOptions(temperature=0.0, logprobs=2, min_tokens=1), {0})
    token, logprobs = sampler.choose(LOGITS, [])
    assert token == 1
    assert logprobs == pytest.approx({0: np.log(0.5), 1: np.log(0.3)}, abs=1e-6)
    rare = Sampler(SamplingOptions(temperature=0.0, logprobs=1, min_tokens=1), {0, 1})
    assert set(rare.choose(LOGITS, [])[1] or {}) == {0, 2}


def test_a_seed_repeats_and_no_seed_does_not(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> list[str]:
        seeds = (7, 7, 8, None, None)
        return [text_of(await answer(engine, request(temperature=2.0, seed=s, max_tokens=24))) for s in seeds]

    a, b, c, d, e = started(tiny_folder, use)
    assert a == b
    assert len({a, c, d, e}) == 4


# Text.


def feed(tmp_path: Path, text: str, stop: tuple[str, ...]) -> tuple[list[str], AnswerText]:
    tokenizer = tiny_tokenizer(tmp_path).backend_tokenizer
    answer = AnswerText(tokenizer, tokenizer.encode("Say:").ids, stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(answer.add(token))
        if answer.stopped:
            break
    return pieces, answer


def test_text_that_may_begin_a_stop_string_is_held_back(tmp_path: Path) -> None:
    pieces, answer = feed(tmp_path, "The end.\n\nQuestion: more", ("\n\nQuestion:",))
    given = ""
    for piece in pieces:
        given += piece
        assert "\n" not in given
    assert given == "The end."
    assert answer.stopped
    assert answer.finish() == ""


def test_what_only_looked_like_a_stop_string_is_given_out(tmp_path: Path) -> None:
    pieces, answer = feed(tmp_path, "a\n\nQuery", ("\n\nQuestion:",))
    assert "".join(pieces) == "a\n\nQuery"
    assert not answer.stopped
    pieces, answer = feed(tmp_path, "a\n\nQ", ("\n\nQuestion:",))
    assert "".join(pieces) == "a"
    assert answer.finish() == "\n\nQ"


def test_the_first_of_several_stop_strings_ends_the_text(tmp_path: Path) -> None:
    pieces, _ = feed(tmp_path, "one two three", ("three", "two"))
    assert "".join(pieces) == "one "


@pytest.mark.parametrize("text", ["東京 and Kraków", "a👩‍👩‍👧b", "é e\u0301"])
def test_a_character_of_several_tokens_appears_whole(tmp_path: Path, text: str) -> None:
    pieces, _ = feed(tmp_path, text, ())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


# Generation.


def test_finish_reasons(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> None:
        whole = await answer(engine, request(max_tokens=8))
        assert [d.finished for d in whole] == [False] * 7 + [True]
        assert (whole[-1].finish_reason, sum(d.n_new_tokens for d in whole)) == ("length", 8)
        assert whole[-1].outcome is not None and whole[0].outcome is None
        tops = await answer(engine, request(max_tokens=8, logprobs=0))
        ids = [next(iter(d.logprobs[0])) for d in tops if d.logprobs]
        assert len(ids) == 8

        stopped = await answer(engine, request(max_tokens=8, stop_token_ids=[ids[3]]))
        n = ids.index(ids[3]) + 1
        assert (stopped[-1].finish_reason, len(stopped)) == ("stop", n)
        assert text_of(whole).startswith(text_of(stopped))
        later = await answer(engine, request(max_tokens=8, stop_token_ids=[ids[3]], min_tokens=n))
        assert len(later) > n

        word = text_of(whole)[4:6]
        cut = await answer(engine, request(max_tokens=8, stop=word))
        assert text_of(cut) == text_of(whole).split(word)[0]
        assert cut[-1].finish_reason == "stop"

        room = await answer(engine, request(250, max_tokens=50))
        assert (len(room), room[-1].finish_reason) == (6, "length")

    started(tiny_folder, use)


def test_an_answer_ends_with_eos_unless_told_otherwise(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: TransformersEngine) -> None:
        first = (await answer(engine, request(max_tokens=1, logprobs=0)))[0].logprobs
        assert first is not None
        engine._alive().eos_ids = frozenset(first[0])
        ended = await answer(engine, request(max_tokens=5, ignore_eos=False))
        assert (len(ended), ended[-1].finish_reason, text_of(ended)) == (1, "stop", "")
        assert len(await answer(engine, request(max_tokens=5, ignore_eos=True))) == 5

    started(tiny_folder, use)


def test_a_chat_model_ends_with_any_eos_of_its_generation_config(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, eos_token_id=[2, 17])

    async def use(engine: TransformersEngine) -> frozenset[int]:
        return engine._alive().eos_ids

    assert started(folder, use) == {2, 17}


def test_prompts_that_cannot_be_served(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> None:
        with pytest.raises(ContextOverflow, match="256 tokens"):
            await answer(engine, request(256))
        with pytest.raises(PromptError, match="no tokens"):
            await answer(engine, request(0))
        with pytest.raises(ConfigurationError, match="Unknown sampling option 'beams'"):
            await answer(engine, request(beams=3))
        assert len(await answer(engine, request(max_tokens=2))) == 2

    started(tiny_folder, use)


class Gate:
    """Lets the model run one forward pass for each `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        self._permits = threading.Semaphore(0)
        forward = TargetModel._output

        def gated(*args: Any, **kwargs: Any) -> Any:
            assert self._permits.acquire(timeout=20)
            self.passes += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(TargetModel, "_output", gated)

    def open(self, n: int = 1) -> None:
        self._permits.release(n)


def test_the_event_loop_stays_free_and_deltas_come_one_by_one(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: TransformersEngine) -> None:
        gate = Gate(monkeypatch)
        stream = engine.generate(*request(max_tokens=3))
        for n in range(1, 4):
            waiting = asyncio.ensure_future(anext(stream))
            # The model cannot run, and yet this loop does: it opens the gate.
            await asyncio.sleep(0.05)
            assert not waiting.done()
            gate.open()
            assert (await waiting).n_new_tokens == 1
            assert gate.passes == n

    started(tiny_folder, use)


def test_closing_the_iterator_stops_the_work(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: TransformersEngine) -> None:
        gate = Gate(monkeypatch)
        gate.open(100)
        stream = engine.generate(*request(max_tokens=50))
        await anext(stream)
        await anext(stream)
        await stream.aclose()
        assert gate.passes == 2
        # The thread is free for others.
        assert len(await answer(engine, request(max_tokens=2))) == 2
        assert gate.passes == 4

    started(tiny_folder, use)


def test_a_cancelled_request_ends_with_the_step_that_runs(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: TransformersEngine) -> None:
        gate = Gate(monkeypatch)
        task = asyncio.ensure_future(answer(engine, request(max_tokens=50)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open(3)
        assert len(await answer(engine, request(max_tokens=2))) == 2
        assert gate.passes == 3

    started(tiny_folder, use)


def test_a_closed_engine_says_so(tiny_folder: Path) -> None:
    async def run() -> None:
        engine = TransformersEngine(tiny_folder, dict(OPTIONS), RAM)
        with pytest.raises(EngineClosed, match="not started"):
            await answer(engine, request())
        await engine.start()
        stream = engine.generate(*request(max_tokens=50))
        await anext(stream)
        engine.close()
        engine.close()
        with pytest.raises(EngineClosed, match="was closed"):
            await anext(stream)
        with pytest.raises(EngineClosed, match="was closed"):
            await engine.reset_prefix_cache()

    asyncio.run(run())


def test_bfloat16_and_eager_attention_pass_the_self_check(tiny_folder: Path) -> None:
    async def use(engine: TransformersEngine) -> str:
        return engine.facts.dtype

    assert started(tiny_folder, use, dtype="bfloat16", attn_implementation="eager") == "bfloat16"


@pytest.mark.parametrize("damage", ["no tensors", "one missing"])
def test_weights_that_cannot_be_loaded(tiny_folder: Path, tmp_path: Path, damage: str) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    if damage == "one missing":
        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        weights.write_bytes(b"no tensors")

    async def run() -> None:
        engine = TransformersEngine(tmp_path, dict(OPTIONS), RAM)
        with pytest.raises(EngineStartError, match="cannot load|weights are missing"):
            await engine.start()
        with pytest.raises(EngineClosed):
            await engine.start()

    asyncio.run(run())


# What is refused, and what is not.

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=512), "sliding-window attention .window 512"),
        (Gemma2Config(), "sliding_attention"),
        (DeepseekV3Config(), "MLA"),
        (LlamaConfig(rope_parameters=DYNAMIC), "'dynamic'"),
        (Phi3Config(rope_parameters=LONGROPE), "'longrope'"),
        (GPT2Config(), "not rotary"),
        (GPT2Config(add_cross_attention=True), "cross-attention"),
        (BloomConfig(), "not rotary"),
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "linear_attention"),
        (SmolLM3Config(), "no RoPE"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else value,
)
def test_unsupported_configs_are_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config("it", config)


def test_a_refusal_comes_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "mistral", sliding_window=64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        TransformersEngine(folder, dict(OPTIONS), RAM)


def made(config_class: Any, model_class: Any, tmp_path: Path, **options: Any) -> TargetModel:
    tokenizer = tiny_tokenizer(tmp_path)
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = config_class(**{**SIZES, **special, **options})
    check_config("it", config)
    model = model_class(config).float().eval()
    _randomize(model, 0)
    return TargetModel(model, tokenizer, 512)


@pytest.mark.parametrize(
    ("config_class", "model_class", "share", "neox"),
    [
        (GPTNeoXConfig, GPTNeoXForCausalLM, 0.25, True),
        (PhiConfig, PhiForCausalLM, 0.5, True),
        (CohereConfig, CohereForCausalLM, 1.0, False),
        (GlmConfig, GlmForCausalLM, 0.5, False),
    ],
)
def test_partial_rotary_and_neighbour_pairs_pass_the_self_check(
    config_class: Any, model_class: Any, share: float, neox: bool, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    target = made(config_class, model_class, tmp_path, rope_parameters=rope)
    assert target.rope.neox is neox
    assert target.rope.cos.shape == (512, int(32 * share) // 2)
    self_check(target)


def test_the_self_check_refuses_a_rotation_the_table_does_not_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM's module gives angles like Llama's and then pairs neighbours, which only its own function shows."""
    monkeypatch.setattr(support, "_rotation_of", lambda model: None)
    with pytest.raises(SelfCheckFailed, match="Positional recovery by 463"):
        self_check(made(GlmConfig, GlmForCausalLM, tmp_path))


@pytest.fixture(scope="module")
def llama(tiny_folder: Path) -> Iterator[TargetModel]:
    yield TargetModel.load(
        tiny_folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=256,
        attn_implementation="sdpa",
    )


def test_the_self_check_finds_a_bottom_right_mask(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def bottom_right(positions: torch.Tensor, length: int) -> torch.Tensor:
        rows = torch.arange(len(positions))[:, None] + length - len(positions)
        return (torch.arange(length) <= rows)[None, None]

    self_check(llama)
    monkeypatch.setattr(model_module, "causal_rows", bottom_right)
    with pytest.raises(SelfCheckFailed, match="Recompute over a written chunk"):
        self_check(llama)


def test_the_self_check_finds_a_rotation_off_by_one(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    move = proofs.RopeTable.move
    monkeypatch.setattr(proofs.RopeTable, "move", lambda rope, keys, delta: move(rope, keys, delta - 1))
    with pytest.raises(SelfCheckFailed):
        self_check(llama)


def test_the_self_check_finds_positions_that_are_ignored(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = llama._model.base_model
    forward = decoder.forward

    def consecutive(*args: Any, position_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(*args, position_ids=torch.arange(position_ids.shape[1])[None], **rest)

    monkeypatch.setattr(decoder, "forward", consecutive)
    with pytest.raises(SelfCheckFailed, match="Recompute over a written chunk"):
        self_check(llama)
