"""Every LangChain pipeline shape reuses the chunks in its prompts; docs/integrations.md shows what this measures."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("langchain", reason="langchain is not installed")
pytest.importorskip("langchain_classic", reason="langchain-classic is not installed")
pytest.importorskip("langgraph", reason="langgraph is not installed")

from langchain_speccache import ChatSpecCache, install
from speccache_rag import SpecCache
from tests.doc_tables import check_table
from tests.integration.langchain.bench import LINES, ONE, PAGES, Bench, Shape, answer_to, reply
from tests.integration.langchain.graphs import graphs
from tests.integration.langchain.shapes import chains, forgotten_format, lcel, wrapped
from tests.integration.processes import wait_until
from tests.scripted import ScriptedRuntime

SHAPES = [*chains(), *graphs()]
COLUMNS = ["pipeline", "call", "chunks in the prompt", "chunks reused"]


def options(folder: Path, store: Path) -> dict[str, object]:
    return {
        "model": str(folder),
        "speculative_model": str(folder),
        "engine": "transformers",
        "store": str(store),
        "admission": "first",  # a retriever's text is captured at its first miss, not at its second
        "min_reuse_tokens": 1,  # some pages have one line
        "engine_options": {"device": "cpu", "dtype": "float32", "max_model_len": 4096},
    }


@pytest.fixture(scope="module")
def runtime(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A tiny model that knows all pages."""
    with SpecCache(**options(tiny_folder, tmp_path_factory.mktemp("store"))) as running:
        running.warm([*PAGES, *LINES], show_progress=False)
        yield running


@pytest.fixture
def newcomer(runtime: SpecCache, request: pytest.FixtureRequest) -> Iterator[SpecCache]:
    """The same engine for a tenant who has no chunks yet."""
    with SpecCache(**{**runtime.config.model_dump(), "tenant": request.node.name}) as running:
        yield running


@dataclass(frozen=True)
class Measurement:
    """What one run left behind."""

    answers: list[str]
    chunks_reused: int
    chunk_tokens_served: int
    """Chunk tokens whose stored KV served: loaded, or replaced because the policy chose them."""
    chunk_tokens_missed: int


Measure = Callable[[Shape], Measurement]


@pytest.fixture(scope="module")
def measure(runtime: SpecCache) -> Measure:
    """Run a shape, once."""
    known: dict[Shape, Measurement] = {}

    def measure(shape: Shape) -> Measurement:
        if shape not in known:
            known[shape] = run(shape, runtime)
        return known[shape]

    return measure


def run(shape: Shape, runtime: SpecCache) -> Measurement:
    bench = Bench(ScriptedRuntime(runtime, shape.reply))
    result = shape.run(bench)
    answers = asyncio.run(result) if inspect.iscoroutine(result) else result
    reports = bench.runtime.reports
    served = sum(report.loaded_tokens + report.recomputed_tokens + report.cached_tokens for report in reports)
    return Measurement(
        answers=list(answers),
        chunks_reused=sum(report.chunks_reused for report in reports),
        chunk_tokens_served=served,
        chunk_tokens_missed=sum(report.missed_tokens for report in reports),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_in_the_prompt_are_reused(shape: Shape, measure: Measure, runtime: SpecCache) -> None:
    found = measure(shape)
    expected = shape.chunks if shape.matches else []
    assert found.answers == [answer_to(query) for query in shape.queries]
    assert found.chunks_reused == len(expected)
    assert found.chunk_tokens_served == sum(len(runtime.tokenizer.encode(text.strip())) for text in expected)
    assert found.chunk_tokens_missed == 0


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("speccache_rag")]


def test_documents_put_in_unjoined_are_warned_of_once(newcomer: SpecCache, caplog: pytest.LogCaptureFixture) -> None:
    newcomer.warm(PAGES, show_progress=False)
    bench = Bench(ScriptedRuntime(newcomer, reply))
    said = [lcel(bench).invoke(ONE[0]), len(warnings(caplog))]
    said += [forgotten_format(bench).invoke(ONE[0]), len(warnings(caplog))]
    said += [forgotten_format(bench).invoke(ONE[0]), len(warnings(caplog))]
    answer = answer_to(ONE[0])
    assert said == [answer, 0, answer, 1, answer, 1]
    assert '"\\n\\n".join(d.page_content for d in documents)' in warnings(caplog)[0]


def test_what_the_retriever_prefetched_is_reused_from_the_second_question_on(newcomer: SpecCache) -> None:
    newcomer.start()
    bench = Bench(ScriptedRuntime(newcomer, reply))
    assert_learns(newcomer, bench, lambda: wrapped(bench).invoke(ONE[0]))


def test_the_installed_hook_prefetches_too_and_can_be_taken_off(newcomer: SpecCache) -> None:
    bench = Bench(ScriptedRuntime(newcomer, reply))
    with install(ChatSpecCache(runtime=bench.runtime)):
        assert_learns(newcomer, bench, lambda: lcel(bench).invoke(ONE[0]))
    lcel(bench).invoke("query 3")
    assert newcomer.stats()["known_chunks"] == 3


def assert_learns(runtime: SpecCache, bench: Bench, ask: Callable[[], str]) -> None:
    """Three unknown chunks are computed for the first question, captured behind it, and reused for the next."""
    ask()
    assert (bench.runtime.reports[-1].chunks_matched, bench.runtime.reports[-1].chunks_reused) == (3, 0)
    assert wait_until(lambda: runtime.stats()["recaptured"] == 3, seconds=20)
    ask()
    assert (bench.runtime.reports[-1].chunks_matched, bench.runtime.reports[-1].chunks_reused) == (3, 3)


def test_the_page_in_docs_is_what_was_measured(measure: Measure, update_docs: bool) -> None:
    counts = [(shape, len(shape.chunks), measure(shape).chunks_reused) for shape in SHAPES]
    alike = itertools.groupby(counts, key=lambda row: (row[0].pipeline, *row[1:]))
    rows = [(name, "; ".join(shape.call for shape, *_ in of), *numbers) for (name, *numbers), of in alike]
    check_table("integrations.md", "langchain", COLUMNS, rows, update=update_docs)
