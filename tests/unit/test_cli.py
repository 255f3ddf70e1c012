"""The command line against a scripted runtime: what is parsed, what is asked, what is printed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner, Result

from speccache_rag.cli.app import app, main
from speccache_rag.cli.options import key_values
from speccache_rag.cli.spoken import as_flags
from speccache_rag.cli.texts import read_documents, split_text
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, ContextOverflow, PromptError
from speccache_rag.runtime import SpecCache
from tests.architecture.sources import CORE, python_files
from tests.unit.fake_runtime import FakeRuntime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()

    def from_config(config: SpecCacheConfig) -> FakeRuntime:
        fake.config = config
        return fake

    monkeypatch.setattr(SpecCache, "from_config", from_config, raising=False)
    return fake


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


# Options.


def test_options_reach_the_configuration(runtime: FakeRuntime, tmp_path: Path) -> None:
    result = run(
        *("ask", "Why?", "--target", "big", "--speculative", "small", "--policy", "full_reuse"),
        *("--recompute-ratio", "0.3", "--scoring", "online", "--store", str(tmp_path), "--tenant", "us"),
        *("--engine-option", "max_model_len=512", "--engine-option", "quantization=awq"),
    )
    assert result.exit_code == 0, result.output
    assert runtime.config == SpecCacheConfig(
        model="big",
        speculative_model="small",
        policy="full_reuse",
        recompute_ratio=0.3,
        scoring="online",
        store=str(tmp_path),
        tenant="us",
        engine_options={"max_model_len": 512, "quantization": "awq"},
    )


def test_options_not_given_keep_their_defaults_and_the_store_is_on_disk(runtime: FakeRuntime) -> None:
    assert run("ask", "Why?", "--model", "big").exit_code == 0
    store = str(Path("~/.cache/speccache/chunks").expanduser())
    assert runtime.config == SpecCacheConfig(model="big", store=store)


def test_every_field_of_the_configuration_is_an_option_of_every_command_that_runs_a_model() -> None:
    commands = dict(get_command(app).commands)
    for name in ("report", "inspect", "forget", "gc", "check"):  # read a folder, run no model
        del commands[name]
    commands |= commands.pop("bench").commands
    del commands["store"]
    for name, command in commands.items():
        assert set(SpecCacheConfig.model_fields) <= {parameter.name for parameter in command.params}, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", "Why?"], "--model is missing"),
        (["ask", "Why?", "--model", "m", "--recompute-ratio", "1.5"], "--recompute-ratio is '1.5'"),
        (["ask", "Why?", "--model", "m", "--scoring", "never"], "--scoring is 'never'"),
        (["ask", "Why?", "--model", "m", "--engine-option", "eager"], "'eager' is not KEY=VALUE"),
        (["ask", " ", "--model", "m"], "The prompt is empty"),
        (["ask", "@nowhere.txt", "--model", "m"], "prompt file 'nowhere.txt' cannot be read"),
        (["warm", "nowhere.txt", "--model", "m"], "'nowhere.txt' cannot be read"),
    ],
)
def test_errors_are_one_red_paragraph_and_code_2(
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["speccache", *arguments])
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""


def test_an_error_of_the_engine_is_printed_too(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.fault = ContextOverflow("5000 tokens do not fit.")
    monkeypatch.setattr(sys, "argv", ["speccache", "ask", "Why?", "--model", "m"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "ContextOverflow: 5000 tokens" in capsys.readouterr().err
    assert runtime.closed


def test_a_programming_error_is_not_swallowed(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.fault = ZeroDivisionError("a bug")
    monkeypatch.setattr(sys, "argv", ["speccache", "ask", "Why?", "--model", "m"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main()


def test_help_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "vllm", "chromadb", "llama_index.core"]
    code = (
        "import sys; from typer.testing import CliRunner; from speccache_rag.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_key_values() -> None:
    assert key_values(["a=1", "b=x=y", 'c={"d": [true]}', "e="], "--o") == {
        "a": 1,
        "b": "x=y",
        "c": {"d": [True]},
        "e": "",
    }
    with pytest.raises(ConfigurationError, match="--o '=1' is not KEY=VALUE"):
        key_values(["=1"], "--o")


# Commands.


def test_ask_prints_answer_and_report(runtime: FakeRuntime, tmp_path: Path) -> None:
    file = tmp_path / "out" / "answer.json"
    result = run("ask", "Why?", "--model", "m", "--max-tokens", "5", "--temperature", "0.5", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == "The answer.\n"
    assert "recomputed" in result.stderr
    assert runtime.calls == [([{"role": "user", "content": "Why?"}], {"max_tokens": 5, "temperature": 0.5})]
    written = json.loads(file.read_text())
    assert written["text"] == "The answer."
    assert written["usage"]["completion_tokens"] == 3
    assert written["report"]["ttft_s"] == 2.0
    assert runtime.closed


def test_a_prompt_comes_from_stdin_or_a_file(runtime: FakeRuntime, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("From a file", encoding="utf-8")
    assert run("ask", "-", "--model", "m", stdin="From stdin").exit_code == 0
    assert run("ask", f"@{tmp_path}/prompt.txt", "--raw", "--model", "m").exit_code == 0
    assert [prompt for prompt, _ in runtime.calls] == [[{"role": "user", "content": "From stdin"}], "From a file"]


def test_explain_prints_every_token(runtime: FakeRuntime, tmp_path: Path) -> None:
    file = tmp_path / "explain.json"
    result = run("explain", "Why?", "--model", "m", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:4] == ["[fresh]", "[loaded]", "[recomputed]", "[missed]"]
    assert "1 loaded, 1 recomputed, 1 fresh, 1 missed" in result.stdout
    written = json.loads(file.read_text())
    assert [token["action"] for token in written["tokens"]] == ["fresh", "loaded", "recomputed", "missed"]
    assert written["report"]["prompt_tokens"] == 4


def test_doctor_ends_with_1_where_a_check_fails(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor", "--model", "m").exit_code == 0
    checks = [SimpleNamespace(name="vllm", ok=False, detail="not installed")]
    monkeypatch.setattr(runtime, "doctor", lambda: checks)
    result = run("doctor", "--model", "m")
    assert result.exit_code == 1
    assert "not installed" in result.stdout


def test_warm_takes_files_folders_and_stdin(runtime: FakeRuntime, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("three four\n\nfive six seven", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one two", encoding="utf-8")
    (tmp_path / "skipped.py").write_text("code", encoding="utf-8")
    file = tmp_path / "warm.json"
    result = run(
        *("warm", str(tmp_path), "-", "--model", "m", "--chunk-tokens", "3", "--json", str(file)), stdin="eight nine\n"
    )
    assert result.exit_code == 0, result.output
    assert runtime.warmed == ["one two", "three four", "five six seven", "eight nine"]
    assert json.loads(file.read_text())["n_captured"] == 4
    assert "4 chunks: 4 captured" in result.stdout


def test_warm_keeps_files_whole_on_request(runtime: FakeRuntime, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two\n\nthree", encoding="utf-8")
    assert run("warm", str(tmp_path / "a.txt"), "--model", "m", "--chunk-tokens", "0").exit_code == 0
    assert runtime.warmed == ["one two\n\nthree"]


def test_warm_without_text_is_refused(runtime: FakeRuntime, tmp_path: Path) -> None:
    result = run("warm", str(tmp_path), "--model", "m")
    assert isinstance(result.exception, PromptError)


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="image.txt"):
        list(read_documents([tmp_path]))


# Splitting.


def words(text: str) -> int:
    return len(text.split())


def test_paragraphs_are_packed_and_long_ones_cut_at_sentences() -> None:
    text = "a b\n\nc d\n\ne f g. h i. j k l m n o p\n"
    assert split_text(text, 4, words) == ["a b\n\nc d", "e f g.", "h i.", "j k l m", "n o p"]


def test_a_word_over_the_limit_is_cut_in_halves() -> None:
    assert split_text("abcdefgh", 3, len) == ["ab", "cd", "ef", "gh"]


@given(st.text(alphabet="ab. \n\té東", max_size=200), st.integers(1, 20))
def test_chunks_are_verbatim_within_the_limit_and_complete(text: str, limit: int) -> None:
    chunks = split_text(text, limit, len)
    assert all(0 < len(chunk) <= limit and chunk == chunk.strip() and chunk in text for chunk in chunks)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_every_command_of_the_design_is_there() -> None:
    text = run("--help").output
    assert all(name in text for name in ("demo", "warm", "ask", "explain", "doctor"))


def test_unknown_options_are_refused(runtime: FakeRuntime) -> None:
    result: Any = run("ask", "Why?", "--model", "m", "--recompute", "0.5")
    assert result.exit_code == 2
    assert "No such option" in result.output


# Advice.


def _advice() -> list[str]:
    """Every literal hint of the package, and every message that names an option."""
    found = []
    for file in python_files(CORE):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                found += [
                    n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["hint"]:
                found += [
                    n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ]
    return found


def test_advice_at_the_command_line_names_its_flags() -> None:
    advice = _advice()
    assert len(advice) > 60
    names = "|".join(SpecCacheConfig.model_fields)
    compound = "|".join(name for name in SpecCacheConfig.model_fields if "_" in name)
    python = re.compile(rf"(?<![\w-])(?:(?:{names})=|(?:{compound})\b)")
    spoken = {text: as_flags(text) for text in advice}
    assert {text: said for text, said in spoken.items() if python.search(said)} == {}
    assert sum(text != said for text, said in spoken.items()) >= 5


@pytest.mark.parametrize(
    ("python", "spoken"),
    [
        (
            "Pass speculative_model=..., such as policy='full_reuse'.",
            "Pass --speculative ..., such as --policy full_reuse.",
        ),
        ("or raise max_model_len in engine_options.", "or raise --engine-option max_model_len."),
        ("pass engine_options={'trust_remote_code': True}; it", "pass --engine-option trust_remote_code=true; it"),
        ("option 'recompute_ratio' is '2'", "--recompute-ratio is '2'"),
        ("Raise ram_bytes, or", "Raise --ram-bytes, or"),
        ("The model and its policy.", "The model and its policy."),
    ],
)
def test_advice_in_flags(python: str, spoken: str) -> None:
    assert as_flags(python) == spoken


def test_errors_are_printed_in_flags(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speccache", "ask", "Why?", "--model", "m", "--recompute-ratio", "2"])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr().err
    assert "--recompute-ratio is '2'" in told
    assert "SpecCacheConfig" not in told


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output.strip()) == (0, f"speccache-rag {version('speccache-rag')}")
