"""The laws on every architecture of tests/kinds.py, in both engines, and the refusal of what is not supported.

vLLM takes half a minute to start, so each run takes only the kinds marked `always` there; `--update-docs`, which writes
docs/models.md, takes them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from speccache_rag import SpecCache
from speccache_rag.engines import ENGINES as ENGINE_CLASSES
from speccache_rag.errors import UnsupportedModel
from tests.conftest import tiny_engine_options
from tests.doc_tables import check_table
from tests.kinds import EQUAL, KINDS, REFUSED
from tests.parity.cases import Case, Layout, assert_equals_naive, load_target
from tests.parity.engines import CHUNKS, ENGINES_ATOL, KV_ATOL
from tests.parity.laws import (
    assert_a_chunk_at_its_place_is_plain_prefill,
    assert_layer_0_is_plain_prefill,
    assert_ratio_one_is_plain_prefill,
)
from tests.tiny import tiny_model

ENGINES = ("transformers", "vllm")
OPTIONS = {
    "transformers": {"device": "cpu", "dtype": "float32", "max_model_len": 1024},
    "vllm": tiny_engine_options(),
}
SHARED = {"transformers": "tsc", "vllm": "sc"}
# vLLM first loads the code of the architecture, in a process of its own.
MARKS = {"transformers": (), "vllm": (pytest.mark.vllm, pytest.mark.slow)}
REFUSALS = [
    pytest.param(name, engine, marks=MARKS[engine])
    for name, kind in KINDS.items()
    for engine in ENGINES
    if getattr(kind, engine).startswith(REFUSED)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which models run: all on Transformers, and on vLLM as the module says."""
    if "model" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--update-docs")
    params = [pytest.param((name, "transformers"), id=name) for name in KINDS if KINDS[name].transformers == EQUAL]
    for name, kind in KINDS.items():
        if kind.vllm == EQUAL and (kind.always or every):
            marks = [pytest.mark.vllm] if name == "llama" else MARKS["vllm"]
            params.append(pytest.param((name, "vllm"), id=f"{name}-vllm", marks=marks))
    metafunc.parametrize("model", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecCache]:
    """A warm engine over one architecture."""
    name, engine = request.param
    if name == "llama":
        shared: SpecCache = request.getfixturevalue(SHARED[engine])
        shared.warm(CHUNKS, show_progress=False)
        yield shared
        return
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    folder: Path = tmp_path_factory.mktemp(name)
    with SpecCache(
        model=str(tiny_model(folder / "model", name)),
        engine=engine,
        policy="random",
        store=str(folder / "store"),
        engine_options=OPTIONS[engine],
    ) as running:
        running.warm(CHUNKS, show_progress=False)
        yield running


def test_recompute_ratio_one_equals_plain_prefill(model: SpecCache) -> None:
    assert_ratio_one_is_plain_prefill(model, policy="random")


@pytest.mark.parametrize("policy", ["random", "full_reuse"])
def test_layer_0_kv_equals_plain_prefill(model: SpecCache, policy: str) -> None:
    assert_layer_0_is_plain_prefill(model, policy)


def test_one_chunk_at_its_captured_position_equals_plain_prefill(model: SpecCache) -> None:
    assert_a_chunk_at_its_place_is_plain_prefill(model)


def test_selective_equals_naive(model: SpecCache) -> None:
    case = Case(model, Layout((63, 40), seed=1))
    oracle = load_target(Path(model.config.model))
    assert_equals_naive(case, oracle, KV_ATOL if model.config.engine == "transformers" else ENGINES_ATOL)
    case.forget()


@pytest.mark.parametrize(("name", "engine"), REFUSALS)
def test_what_is_not_supported_is_refused_before_anything_is_loaded(name: str, engine: str, tmp_path: Path) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tiny_model(tmp_path, name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel) as caught:
        ENGINE_CLASSES.load(engine)(folder, OPTIONS[engine], {"path": None, "ram_bytes": 1 << 20})
    assert getattr(KINDS[name], engine).removeprefix(REFUSED) in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_says_what_runs(engine: str, update_docs: bool) -> None:
    rows = [(kind.architecture, kind.exercises, getattr(kind, engine)) for kind in KINDS.values()]
    columns = ("architecture", "what it exercises", "reuse")
    check_table("models.md", f"models-{engine}", columns, rows, update=update_docs)
