"""The Transformers engine at work: streaming, ends, processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from speccache_rag.engines.transformers.engine import TransformersEngine
from speccache_rag.engines.transformers.model import TargetModel
from speccache_rag.errors import (
    ConfigurationError,
    ContextOverflow,
    EngineClosed,
    EngineStartError,
    PromptError,
)
from tests.tiny import tiny_model
from tests.unit.transformers_engine.serving import OPTIONS, RAM, answer, request, started, text_of


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
