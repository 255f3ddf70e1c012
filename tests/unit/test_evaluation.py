"""The evaluation: data files, F1, divergence, and whole runs over tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from speccache_rag.cli.app import app
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, PromptError, SpecCacheError
from speccache_rag.evaluation.datasets import read_examples
from speccache_rag.evaluation.divergence import divergence
from speccache_rag.evaluation.metrics import best_f1, f1
from speccache_rag.evaluation.report import ResultFile, summarize
from speccache_rag.evaluation.runner import Contestant, Evaluation, Record, all_contestants, one_policy
from speccache_rag.hosting.engine_host import EngineHost

EXAMPLES = [
    {
        "id": "mill",
        "question": "What did the mill of Arden grind?",
        "answers": ["rye", "rye for forty years"],
        "chunks": [
            {"title": "Arden", "text": "The mill of Arden ground rye for forty years, and it burned down twice."},
            {"title": "Boro", "text": "A bridge in Boro carries the road; its third arch is younger than the others."},
        ],
        "dataset": "made up",
    },
    {
        "id": "clock",
        "question": "How many hands has the clock of Cale?",
        "answers": ["one"],
        "chunks": [{"text": "Cale keeps the oldest clock in the valley; it has one hand only.", "supporting": True}],
    },
    {
        "id": "bees",
        "question": "How do bees find their way home?",
        "answers": ["by the sun"],
        "chunks": [
            {"title": "Bees", "text": "Bees find their way home by the sun, or by the pattern of the light."},
            {"title": "Cale", "text": "Visitors set their watches by the clock of Cale, and they are late."},
            {"title": "Bread", "text": "Bread baked on stone has a darker crust than bread baked in a tin."},
        ],
    },
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "three.jsonl"
    file.write_text("\n".join(json.dumps(example) for example in EXAMPLES) + "\n", encoding="utf-8")
    return file


def config(model: Path, **options: Any) -> SpecCacheConfig:
    engine = {"device": "cpu", "dtype": "float32", "max_model_len": 1024}
    options = {"min_reuse_tokens": 1, **options}  # the chunks of these examples are short
    return SpecCacheConfig.build(model=str(model), engine="transformers", engine_options=engine, **options)


# Data files.


def test_examples_are_read_in_order(data: Path) -> None:
    assert [example.id for example in read_examples(data, 2)] == ["mill", "clock"]
    mill, clock, _ = read_examples(data, 99)
    assert mill.texts[1].startswith("Boro\nA bridge")
    assert clock.texts == ["Cale keeps the oldest clock in the valley; it has one hand only."]
    user = mill.messages[-1]["content"]
    assert "\n\n".join(mill.texts) in user
    assert user.endswith("Question: What did the mill of Arden grind?")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no example"),
        ("{}\n", r"Line 1 of .* is no example: id: Field required; question: .*; answers: .*; chunks: "),
        ("not json\n", "Line 1 of .* is no example: line: Invalid JSON"),
        (json.dumps(EXAMPLES[0]) + "\n\n" + json.dumps({**EXAMPLES[1], "answers": []}), "Line 3 of .*: answers: "),
        (json.dumps({**EXAMPLES[0], "chunks": [{"title": "no text"}]}), r"chunks\.0\.text: Field required"),
        (json.dumps({**EXAMPLES[0], "answers": "rye"}), "answers: Input should be a valid array"),
    ],
)
def test_a_bad_data_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=message):
        read_examples(file, 3)


def test_a_data_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"'.*nowhere\.jsonl' cannot be read"):
        read_examples(tmp_path / "nowhere.jsonl", 3)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(PromptError, match="cannot be read"):
        read_examples(tmp_path / "latin.jsonl", 3)


# Metrics.


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The Lighthouse!", "lighthouse", 1.0),
        ("an old mill", "the mill", 2 / 3),
        ("yes", "no", 0.0),
        ("rye rye", "rye", 2 / 3),
        ("", "rye", 0.0),
        ("the", "...", 1.0),
    ],
)
def test_f1(answer: str, reference: str, expected: float) -> None:
    assert f1(answer, reference) == pytest.approx(expected)


def test_the_best_reference_counts() -> None:
    assert best_f1("forty years", ["forty", "forty years", "no"]) == 1.0


def test_divergence_of_known_distributions() -> None:
    half = torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))
    other = torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]]))
    found = divergence(half, other + 3.0)  # logits are known up to a constant
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, abs=1e-6)
    assert found.agreement == 0.5
    assert divergence(half, half).kl == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(1, 2\)"):
        divergence(half, half[:1])


# Runs.


def test_ratio_one_is_full_recompute_and_full_reuse_is_not(tiny_folder: Path, data: Path) -> None:
    everything = Contestant("all", "random")
    nothing = Contestant("reuse", "full_reuse")
    with Evaluation(config(tiny_folder, recompute_ratio=1.0), [everything, nothing]) as evaluation:
        records = [record for example in read_examples(data, 3) for record in evaluation.run(example)]
    by_name = {name: [r for r in records if r.contestant == name] for name in ("full_recompute", "all", "reuse")}
    assert all(len(found) == 3 for found in by_name.values())
    for full, same, reuse in zip(*by_name.values(), strict=True):
        assert (full.kl, full.agreement, full.effective_ratio) == (0, 1, 1)
        assert same.kl == pytest.approx(0, abs=1e-6)
        # The clock's only chunk stands where it was captured: it is exact, and nothing is left to recompute.
        ratio = 0 if full.example == "clock" else 1
        assert (same.agreement, same.effective_ratio, same.answer) == (1, ratio, full.answer)
        assert reuse.effective_ratio == 0
        assert reuse.chunk_tokens == same.chunk_tokens == full.chunk_tokens > 10
    assert max(record.kl for record in by_name["reuse"]) > 1e-3


def test_an_answer_of_its_own_is_what_generate_gives(tiny_folder: Path, data: Path) -> None:
    example = read_examples(data, 3)[2]
    options = config(tiny_folder, recompute_ratio=0.0)
    with Evaluation(options, [Contestant("reuse", "full_reuse")]) as evaluation:
        full, reuse = evaluation.run(example)
        sc = evaluation._runs[0][1]
        for found, policy in ((full, "full_recompute"), (reuse, "full_reuse")):
            text = sc.generate(example.messages, max_tokens=16, temperature=0.0, policy=policy).text
            # A stream never gives out the bytes of half a character.
            assert text.rstrip("\ufffd") == found.answer.rstrip("\ufffd")
    assert reuse.agreement < 1 and reuse.answer != full.answer


def test_the_anchor_is_all_that_precedes_the_first_chunk(tiny_folder: Path, data: Path) -> None:
    example = read_examples(data, 1)[0]
    with Evaluation(config(tiny_folder), [Contestant("reuse", "full_reuse")]) as evaluation:
        evaluation.run(example)
        sc = evaluation._runs[0][1]
        plan, prompt = sc.plan(example.messages).reuse, sc.plan(example.messages).prompt
    assert [chunk.exact for chunk in plan.chunks] == [True, *[False] * (len(plan.chunks) - 1)]
    assert [p.chunk.text for p in prompt.placements] == example.texts


def test_another_engine_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="engine is 'vllm'"):
        Evaluation(SpecCacheConfig.build(model=str(tiny_folder)), [])


def test_a_wrong_contestant_leaves_no_engine_behind(tiny_folder: Path) -> None:
    before = set(EngineHost._hosts)
    with pytest.raises(ConfigurationError, match="Unknown options of policy 'epic': k"):
        Evaluation(config(tiny_folder, tenant="nobody", ram_bytes=4096), [Contestant("bad", "epic", {"k": 1})])
    assert set(EngineHost._hosts) == before


def test_each_speculative_model_scores_for_attended() -> None:
    names = [one.name for one in all_contestants(["models/big", "models/small"])]
    assert {"attended, big", "attended, small", "attended, target", "speccache, online"} <= set(names)
    assert len(names) == len(set(names))
    assert not any(one.speculative_model for one in all_contestants([]))


def test_one_policy_stands_there_once_for_each_model(tiny_folder: Path) -> None:
    options = config(tiny_folder, policy="attended", policy_options={"layers": "all"})
    for models, names in [([], ["attended"]), (["m/a"], ["attended"]), (["m/a", "b"], ["attended, a", "attended, b"])]:
        found = one_policy(options, models)
        assert [one.name for one in found] == names
        assert [one.speculative_model for one in found] == (models or [None])
        assert all(one.policy_options == {"layers": "all"} for one in found)


# The command.


def evaluate(data: Path, model: Path, *arguments: str) -> Result:
    options = ("--engine-option", "max_model_len=1024", "--engine-option", "dtype=float32")
    return CliRunner().invoke(app, ["eval", str(data), "--model", str(model), *options, *arguments])


def test_the_command_writes_a_record_for_each_example_and_policy(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ("--speculative", str(tiny_folder), "--recompute-ratio", "0.3", "--json", str(file))
    result = evaluate(data, tiny_folder, "-n", "2", *arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    names = ["full_recompute", *(one.name for one in all_contestants([str(tiny_folder)]))]
    assert [row["contestant"] for row in written["summary"]] == names
    assert [(r["example"], r["contestant"]) for r in written["records"]] == [
        (e, n) for e in ("mill", "clock") for n in names
    ]
    records = {r["contestant"]: r for r in written["records"] if r["example"] == "mill"}
    for name in names[2:]:
        assert 0 < records[name]["effective_ratio"] <= 0.3 * 1.25 + 0.05, name
    assert records["speccache, cached"]["scoring"] == "cached"
    assert records["speccache, online"]["scoring"] == "online"
    assert records["attended, llama"]["scoring"] == "attended"
    assert "attended, target" in result.output

    # Going on: only what is missing is computed, and what is there is taken up as it stands.
    kept = json.loads(file.read_text())
    kept["records"][0]["answer"] = "taken up"
    file.write_text(json.dumps(kept))
    assert evaluate(data, tiny_folder, "-n", "3", *arguments).exit_code == 0
    again = json.loads(file.read_text())
    assert len(again["records"]) == 3 * len(names)
    assert again["records"][0]["answer"] == "taken up"
    assert {row["n"] for row in again["summary"]} == {3}


def test_one_policy_may_be_named(tiny_folder: Path, data: Path) -> None:
    result = evaluate(data, tiny_folder, "-n", "1", "--policy", "cacheblend", "--policy-option", "of=key")
    assert result.exit_code == 0, result.output
    assert "cacheblend" in result.output and "epic" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy-option", "of=key"], "policy_options given, but no policy"),
        (["--engine", "vllm"], "engine is 'vllm'"),
    ],
)
def test_options_that_make_no_sense(data: Path, tiny_folder: Path, arguments: list[str], message: str) -> None:
    result = evaluate(data, tiny_folder, *arguments)
    assert isinstance(result.exception, SpecCacheError)
    assert message in str(result.exception)


# Results.


def record(contestant: str, example: str, kl: float) -> Record:
    return Record(example, contestant, 0.5, kl, 0.75, 0.15, "rye", 100, 80, None)


def test_mean_and_median() -> None:
    rows = summarize([record("b", "1", 0.0), record("a", "1", 1.0), record("b", "2", 0.1), record("b", "3", 0.8)])
    assert [(row.contestant, row.n) for row in rows] == [("b", 3), ("a", 1)]
    assert rows[0].kl_mean == pytest.approx(0.3)
    assert rows[0].kl_median == pytest.approx(0.1)
    assert (rows[0].f1, rows[0].agreement, rows[0].effective_ratio) == pytest.approx((0.5, 0.75, 0.15))


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    ResultFile(file, {"ratio": 0.15}).add([record("a", "1", 0.2)])
    assert ResultFile(file, {"ratio": 0.15}).done == {"1"}
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(ConfigurationError, match="holds results of other settings"):
        ResultFile(file, {"ratio": 0.3})
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match="holds no results of an evaluation"):
        ResultFile(file, {"ratio": 0.15})
