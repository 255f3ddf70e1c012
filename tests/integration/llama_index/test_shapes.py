"""Every pipeline shape on a real engine: each chunk in a prompt is found there, and its KV is used.

The model is tiny and random, and its answers are scripted; prompts, matching and reuse are real.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed")

from llama_index.core import Settings
from llama_index.llms.speccache import SpecCacheLLM

from speccache_rag import SpecCache
from speccache_rag.types import Chunk, PrefillReport
from tests.doc_tables import check_table
from tests.hosts import known, library_of
from tests.integration.llama_index import conversations, query_engines
from tests.integration.llama_index.shapes import CHUNKS, Shape
from tests.scripted import ScriptedRuntime

# LlamaIndex's own: chat memories that are never closed, agents that look at every attribute of a model.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deleted before being closed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
]

SHAPES = [*query_engines.SHAPES, *conversations.SHAPES]
MIN_PREFIX = 64
"""Characters of a cut chunk that must be there."""


@dataclass(frozen=True)
class Run:
    """What came of a shape."""

    answer: str
    prompts: list[str]
    reports: list[PrefillReport]
    warnings: list[str]


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """By the shape's name; the table is made of the same runs that were tested."""
    return {}


class Pipeline:
    """Runs shapes."""

    def __init__(self, runtime: SpecCache, caplog: pytest.LogCaptureFixture, runs: dict[str, Run]) -> None:
        self._runtime, self._caplog, self._runs = runtime, caplog, runs

    def run(self, shape: Shape) -> Run:
        if shape.name not in self._runs:
            self._runs[shape.name] = self._run(shape)
        return self._runs[shape.name]

    def _run(self, shape: Shape) -> Run:
        scripted = ScriptedRuntime(self._runtime, shape.replies)
        library_of(self._runtime).escaped._found = False  # each shape is warned of anew
        self._caplog.clear()
        llm = SpecCacheLLM(runtime=scripted)  # type: ignore[arg-type]
        if shape.context is not None:
            tokens_each = scripted.max_model_len / llm.metadata.context_window  # the model's for LlamaIndex's
            scripted.max_model_len = round(shape.context * tokens_each)
        Settings.llm = llm
        result = shape.run(llm)
        answer = str(asyncio.run(result) if asyncio.iscoroutine(result) else result)
        told = [r.getMessage() for r in self._caplog.records if r.name == "speccache_rag.chunks.escaped"]
        return Run(answer, scripted.prompts, scripted.reports, told)

    def chunk(self, name: str) -> Chunk:
        return known(self._runtime, CHUNKS[name])

    def n_tokens(self, names: str, prompt: str) -> int:
        """How many chunk tokens a prompt with these chunks must reuse."""
        return sum(self._tokens_of(name, prompt) for name in names.split())

    def _tokens_of(self, name: str, prompt: str) -> int:
        if name.startswith("!"):
            return 0
        chunk = self.chunk(name.rstrip("|"))
        if name == name.rstrip("|"):
            assert chunk.text in prompt
            return chunk.n_tokens
        # The longest beginning that is there, told without the matcher.
        n_chars = next(n for n in range(len(chunk.text), 0, -1) if chunk.text[:n] in prompt)
        assert MIN_PREFIX <= n_chars < len(chunk.text)
        return int((chunk.offsets[:, 1] <= n_chars).sum())


@pytest.fixture
def pipeline(runtime: SpecCache, caplog: pytest.LogCaptureFixture, runs: dict[str, Run], settings: None) -> Pipeline:
    caplog.set_level(logging.WARNING, "speccache_rag")
    return Pipeline(runtime, caplog, runs)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_every_chunk_in_every_prompt_is_reused(pipeline: Pipeline, shape: Shape) -> None:
    run = pipeline.run(shape)
    by_prompt = dict(zip(run.prompts, run.reports, strict=True))
    assert len(run.prompts) == len(shape.chunks)
    wanted, found = [], []
    # Prompts of threads and tasks come in any order.
    for names, prompt in zip(shape.chunks, in_order(pipeline, shape, run), strict=True):
        report = by_prompt[prompt]
        reusable = [name for name in names.split() if not name.startswith("!")]
        wanted.append((len(reusable), pipeline.n_tokens(names, prompt), 0))
        used = report.loaded_tokens + report.recomputed_tokens + report.cached_tokens
        found.append((report.chunks_reused, used, report.missed_tokens))
        assert not reusable or report.loaded_tokens > 0.5 * report.matched_tokens
    assert found == wanted
    assert shape.answer in (run.answer, None)


def in_order(pipeline: Pipeline, shape: Shape, run: Run) -> list[str]:
    """The prompts in the order in which the shape names them."""
    rest, ordered = list(run.prompts), []
    for names in shape.chunks:
        texts = [pipeline.chunk(name).text for name in names.split() if name in CHUNKS]
        prompt = next((p for p in rest if all(text in p for text in texts)), rest[0])
        rest.remove(prompt)
        ordered.append(prompt)
    return ordered


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_one_warning_where_chunks_cannot_match_and_none_elsewhere(pipeline: Pipeline, shape: Shape) -> None:
    told = pipeline.run(shape).warnings
    assert len(told) == ("!" in " ".join(shape.chunks))


def test_the_table_in_the_docs(pipeline: Pipeline, update_docs: bool) -> None:
    rows = []
    for shape in SHAPES:
        run = pipeline.run(shape)
        there = sum(len(names.split()) for names in shape.chunks)
        rows.append((shape.pipeline, shape.call, there, sum(report.chunks_reused for report in run.reports)))
    columns = ["pipeline", "call", "chunks in the prompt", "chunks reused"]
    check_table("integrations.md", "llama-index", columns, rows, update=update_docs)
