"""The evaluation: data files, F1, divergence, and whole runs over tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from speccache_rag.cli.app import app
from speccache_rag.config import SpecCacheConfig
from speccache_rag.errors import ConfigurationError, PromptError, SpecCacheError
from speccache_rag.evaluation.contestants import Contestant, contestants, expression_of, split_list
from speccache_rag.evaluation.datasets import Example, passages, read_examples
from speccache_rag.evaluation.divergence import divergence
from speccache_rag.evaluation.harness import Evaluation
from speccache_rag.evaluation.metrics import best_f1, best_rouge_l, contains, exact_match, f1
from speccache_rag.evaluation.records import Record, RecordFile, pack, read_records, unpack
from speccache_rag.evaluation.results import Results
from speccache_rag.evaluation.tuning import candidates, cheapest
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
        ("{}\n", r"Line 1 of .* is no example: question: Field required; chunks: "),
        ("not json\n", "Line 1 of .* is no example: it is no JSON object"),
        (json.dumps(EXAMPLES[0]) + "\n\n" + json.dumps({**EXAMPLES[1], "chunks": []}), "Line 3 of .*: chunks: "),
        (json.dumps({**EXAMPLES[0], "chunks": [{"title": "no text"}]}), r"chunks\.0\.text: Field required"),
        (json.dumps({**EXAMPLES[0], "answers": "rye"}), "answers: Input should be a valid list"),
    ],
)
def test_a_bad_data_file_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(PromptError, match=message):
        read_examples(file, 3)


def test_another_name_of_chunks_and_no_id(tmp_path: Path) -> None:
    file = tmp_path / "blend.jsonl"
    file.write_text(json.dumps({"question": "Q?", "answers": ["a"], "ctxs": [{"title": "T", "text": "x"}]}) + "\n")
    (example,) = read_examples(file, 1)
    assert (example.id, example.dataset, example.texts) == ("1", "blend", ["T\nx"])


def test_longbench(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    context = "Passage 1:\nOne.\n\nMore of one.\nPassage 2:\nTwo."
    line = {"input": "Q?", "context": context, "answers": ["a"], "dataset": "2wikimqa", "_id": "7", "length": 9}
    file.write_text(json.dumps(line) + "\n")
    (example,) = read_examples(file, 1)
    assert (example.id, example.dataset, example.question) == ("7", "2wikimqa", "Q?")
    assert example.texts == ["Passage 1:\nOne.\n\nMore of one.", "Passage 2:\nTwo."]
    assert list(passages("One.\n\nTwo.\n \n\nThree.")) == ["One.", "Two.", "Three."]


def test_questions_alone_get_their_chunks_from_a_retriever(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('How late?\n\n{"id": "x", "question": "Who?"}\n')
    late, who = read_examples(file, 9, lambda question: [f"about {question}", "more"])
    assert (late.id, late.question, late.texts, late.answers) == ("1", "How late?", ["about How late?", "more"], [])
    assert (who.id, who.texts[0]) == ("x", "about Who?")
    with pytest.raises(PromptError, match="Line 1 of .* is no JSON object"):
        read_examples(file, 9)


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
    assert exact_match("Forty years.", ["no", "the forty years"]) == 1.0
    assert exact_match("forty years ago", ["forty years"]) == 0.0


def test_a_needle_is_found_word_for_word() -> None:
    assert contains("It ground rye, for the forty years.", ["rye for forty years"]) == 1.0
    assert contains("It ground ryegrass", ["rye"]) == 0.0


def test_rouge_l() -> None:
    assert best_rouge_l("the mill ground rye", ["the mill ground rye"]) == pytest.approx(1.0)
    # Longest common subsequence: mill, rye; of 3 and 2 words.
    assert best_rouge_l("mill grinds rye", ["mill rye", "clock"]) == pytest.approx(2 * 2 / 5)


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


def run(evaluation: Evaluation, examples: list[Example]) -> dict[str, list[Record]]:
    """All records, by contestant."""
    found: dict[str, list[Record]] = {}
    for example in examples:
        for record in evaluation.run(example, evaluation.missing(example, set())):
            found.setdefault(record.contestant, []).append(record)
    return found


def test_ratio_one_is_full_recompute_and_full_reuse_is_not(tiny_folder: Path, data: Path) -> None:
    compared = [Contestant("random", 1.0), Contestant("full_reuse", 0.0)]
    with Evaluation(config(tiny_folder), compared) as evaluation:
        records = run(evaluation, read_examples(data, 3))
    assert [len(found) for found in records.values()] == [3, 3, 3]
    for full, same, reuse in zip(records["full_recompute"], records["random"], records["full_reuse"], strict=True):
        assert (full.kl, full.agreement, full.effective_ratio) == (0, 1, 1)
        assert same.kl == pytest.approx(0, abs=1e-6)
        assert (same.agreement, same.answer) == (1, full.answer)
        assert same.effective_ratio == pytest.approx(1 - same.exact_tokens / same.chunk_tokens)
        assert reuse.effective_ratio == 0
        assert reuse.chunk_tokens == same.chunk_tokens == full.chunk_tokens > 10
    assert max(record.kl for record in records["full_reuse"]) > 1e-3


def test_the_tokens_of_a_record_add_up(tiny_folder: Path, data: Path) -> None:
    compared = [Contestant("full_reuse", 0.0), Contestant("epic", 0.3), Contestant("attended(target)", 0.3)]
    with Evaluation(config(tiny_folder), compared) as evaluation:
        records = run(evaluation, read_examples(data, 3)[2:])
    (full,), (reuse,), (epic,), (attended,) = records.values()
    assert full.computed_tokens == full.prompt_tokens
    assert reuse.computed_tokens == reuse.fresh_tokens + reuse.query_tokens
    for record in (full, reuse, epic, attended):
        assert record.chunk_tokens + record.fresh_tokens + record.query_tokens == record.prompt_tokens
        assert unpack(record.selected or "", record.chunk_tokens).sum() == record.selected_tokens
    assert epic.selected_tokens == math.ceil(0.3 * (epic.chunk_tokens - epic.exact_tokens))
    assert epic.exact_tokens > 0 and epic.runs == 3
    assert attended.scoring_tokens == attended.fresh_tokens + attended.query_tokens
    assert epic.nll is not None and full.nll is not None and epic.nll != full.nll


def test_an_answer_of_its_own_is_what_generate_gives(tiny_folder: Path, data: Path) -> None:
    example = read_examples(data, 3)[2]
    with Evaluation(config(tiny_folder), [Contestant("full_reuse", 0.0)]) as evaluation:
        (full,), (reuse,) = run(evaluation, [example]).values()
        sc = evaluation.runtime(example)
        for found, policy in ((full, "full_recompute"), (reuse, "full_reuse")):
            text = sc.generate(example.messages, max_tokens=16, temperature=0.0, policy=policy).text
            # A stream never gives out the bytes of half a character.
            assert found.answer is not None and text.rstrip("\ufffd") == found.answer.rstrip("\ufffd")
    assert reuse.agreement < 1 and reuse.answer != full.answer


def test_texts_can_be_left_out(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    with Evaluation(config(tiny_folder), [Contestant("full_reuse", 0.0)], keep_texts=False) as evaluation:
        example = read_examples(data, 1)[0]
        file = RecordFile(tmp_path)
        for record in evaluation.run(example, evaluation.missing(example, file.done)):
            file.add(record)
    assert all(record.answer is None and record.answer_sha256 for record in file.records)
    assert '"answer"' not in (tmp_path / "runs.jsonl").read_text()


def test_the_anchor_is_all_that_precedes_the_first_chunk(tiny_folder: Path, data: Path) -> None:
    example = read_examples(data, 1)[0]
    with Evaluation(config(tiny_folder), []) as evaluation:
        sc = evaluation.runtime(example)
        sc.warm(example.texts, show_progress=False)
        plan = sc.plan(example.messages)
    assert [chunk.exact for chunk in plan.reuse.chunks] == [True, False]
    assert [p.chunk.text for p in plan.prompt.placements] == example.texts


def test_another_engine_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="engine is 'vllm'"):
        Evaluation(SpecCacheConfig.build(model=str(tiny_folder)), [])


def test_a_wrong_contestant_leaves_no_engine_behind(tiny_folder: Path) -> None:
    before = set(EngineHost._hosts)
    with pytest.raises(ConfigurationError, match="Unknown options of policy 'epic': k"):
        Evaluation(config(tiny_folder, tenant="nobody", ram_bytes=4096), [Contestant("epic(k=1)", 0.1)])
    assert set(EngineHost._hosts) == before


# Contestants.


def test_each_policy_stands_there_at_each_ratio_and_for_each_scorer() -> None:
    found = contestants(["epic", "attended", "full_reuse", "random@0.5"], [0.1, 0.2], ["m/big", "small"], ["cached"])
    assert [(one.name, one.recompute_ratio) for one in found] == [
        ("epic", 0.1),
        ("epic", 0.2),
        ("attended by big", 0.1),
        ("attended by small", 0.1),
        ("attended by big", 0.2),
        ("attended by small", 0.2),
        ("full_reuse", 0.0),
        ("random", 0.5),
    ]


def test_only_importance_is_scored_in_two_ways() -> None:
    found = contestants(["speccache", "attended"], [0.1], ["small"], ["cached", "online"])
    assert [one.name for one in found] == [
        "speccache by small, cached",
        "speccache by small, online",
        "attended by small",
    ]


@pytest.mark.parametrize(
    ("policies", "message"),
    [(["attended"], "asks a speculative model"), (["epic@x"], r"no ratio in \[0, 1\]"), (["epic@2"], "no ratio in")],
)
def test_contestants_that_make_no_sense(policies: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        contestants(policies, [0.1], [], ["cached"])


def test_lists_and_expressions() -> None:
    assert split_list("epic, speccache(tau_cover=0.5, layers=all)@0.1,") == [
        "epic",
        "speccache(tau_cover=0.5, layers=all)@0.1",
    ]
    assert expression_of("speccache", {"complete": False, "layers": "all"}) == "speccache(complete=false, layers=all)"
    assert expression_of("epic", {}) == "epic"


# The command.


def evaluate(data: Path, model: Path, *arguments: str) -> Result:
    options = ("--engine-option", "max_model_len=1024", "--engine-option", "dtype=float32")
    return CliRunner().invoke(app, ["eval", str(data), "--model", str(model), *options, *arguments])


def test_the_command_writes_a_record_for_each_example_and_contestant(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    arguments = ("--speculative", str(tiny_folder), "--recompute-ratio", "0.3", "--out", str(folder))
    result = evaluate(data, tiny_folder, "-n", "2", *arguments)
    assert result.exit_code == 0, result.output
    records = list(read_records(folder / "runs.jsonl"))
    names = [record.contestant for record in records if record.example == "mill"]
    assert names[0] == "full_recompute" and len(names) == len(set(names))
    assert {"full_reuse", "attended by llama", "attended(target)", "speccache by llama, online"} <= set(names)
    assert [(r.example, r.contestant) for r in records] == [(e, n) for e in ("mill", "clock") for n in names]
    by_name = {record.contestant: record for record in records if record.example == "mill"}
    assert by_name["speccache by llama, cached"].scoring == "cached"
    assert by_name["speccache by llama, online"].scoring == "online"
    assert by_name["speccache by llama, online"].scoring_tokens == by_name["epic"].prompt_tokens
    assert by_name["attended by llama"].scoring == "attended"

    # Going on: only what is missing is computed, and what is there stays as it stands.
    before = (folder / "runs.jsonl").read_text()
    assert evaluate(data, tiny_folder, "-n", "3", *arguments, "--policies", "epic").exit_code == 0
    after = (folder / "runs.jsonl").read_text()
    assert after.startswith(before)
    assert [(r.example, r.contestant) for r in read_records(folder / "runs.jsonl")][len(records) :] == [
        ("bees", "full_recompute"),
        ("bees", "epic"),
    ]


def test_a_report_is_made_of_it(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path), "--policies", "full_reuse,epic,random", "--ratios", "0.1,0.4")
    assert evaluate(data, tiny_folder, *arguments).exit_code == 0
    assert evaluate(data, tiny_folder, "--out", str(tmp_path), "--study", "deviation").exit_code == 0
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text, html = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "| epic@0.4 | 3 |" in text and "too few" in text
    assert html.count("<svg") == 6 and "speccache bench ttft" in html
    assert "http://" not in html.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert CliRunner().invoke(app, ["report", str(tmp_path), "--figure", "ratios"]).exit_code == 0
    assert (tmp_path / "ratios.svg").read_text().startswith("<svg")
    refused = CliRunner().invoke(app, ["report", str(tmp_path), "--figure", "tau"])
    assert isinstance(refused.exception, ConfigurationError) and "--study tau" in str(refused.exception)


def test_one_policy_may_be_named(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--policy", "cacheblend", "--policy-option", "of=key", "--out", str(tmp_path))
    result = evaluate(data, tiny_folder, "-n", "1", *arguments)
    assert result.exit_code == 0, result.output
    assert {record.contestant for record in RecordFile(tmp_path).records} == {"full_recompute", "cacheblend(of=key)"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy-option", "of=key"], "policy_options given, but no policy"),
        (["--engine", "vllm"], "engine is 'vllm'"),
        (["--ratios", "0.1,2"], "--ratios has 2.0"),
        (["--study", "nothing"], "study is 'nothing'"),
    ],
)
def test_options_that_make_no_sense(
    data: Path, tiny_folder: Path, arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = evaluate(data, tiny_folder, "--out", str(tmp_path), *arguments)
    assert isinstance(result.exception, SpecCacheError)
    assert message in str(result.exception)


# Records.


def record(contestant: str, example: str, kl: float, **changes: Any) -> Record:
    facts = {"dataset": "d", "target": "t", "policy": contestant, "recompute_ratio": 0.15, "effective_ratio": 0.15}
    counts = {"prompt_tokens": 100, "chunk_tokens": 80, "selected_tokens": 12, "fresh_tokens": 5, "query_tokens": 15}
    return Record(
        example=example, contestant=contestant, kl=kl, agreement=0.75, runs=4, **{**facts, **counts, **changes}
    )


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "new")
    file.add(record("epic", "1", 0.25, f1=0.5, selected=pack(np.array([True, False, True]))))
    (again,) = RecordFile(tmp_path / "new").records
    assert again == file.records[0]
    assert unpack(again.selected or "", 3).tolist() == [True, False, True]
    assert file.done == {("d", "1", "t", "epic", 0.15)}


def test_an_interrupted_line_is_written_again(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.add(record("epic", "1", 0.25))
    with (tmp_path / "runs.jsonl").open("a") as stream:
        stream.write('{"example": "2", "data')
    again = RecordFile(tmp_path)
    assert len(again.records) == 1
    again.add(record("epic", "2", 0.5))
    assert [r.example for r in RecordFile(tmp_path).records] == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "message"), [("[1]\n", "no JSON object|without"), ('{"kl": 1}\n', "without agreement, chunk")]
)
def test_another_file_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "runs.jsonl").write_text(line)
    with pytest.raises(ConfigurationError, match=message):
        RecordFile(tmp_path)


# Tuning.


def test_the_cheapest_that_fits(tmp_path: Path) -> None:
    noisy = [0.0, 0.3, 0.02, 0.25, 0.0, 0.2]
    cheap = [record("full_reuse", str(i), kl, recompute_ratio=0.0, selected_tokens=0) for i, kl in enumerate(noisy)]
    dear = [record("epic", str(i), kl / 10) for i, kl in enumerate(noisy)]
    full = [record("full_recompute", str(i), 0.0, recompute_ratio=1.0, selected_tokens=80) for i in range(6)]
    results = Results([*full, *dear, *cheap])
    tried = candidates(results, "kl", 0.1)
    assert [(one.label, one.fits) for one in tried] == [
        ("full_reuse", False),
        ("epic@0.15", True),
        ("full_recompute", True),
    ]
    best = cheapest(tried)
    assert best is not None and best.label == "epic@0.15"
    assert cheapest(candidates(results, "kl", 0.5)).label == "full_reuse"  # type: ignore[union-attr]
    assert cheapest(candidates(Results(cheap), "kl", 0.1)) is None


def test_a_tuned_configuration_is_written_and_loads(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "speccache.toml"
    questions = tmp_path / "four.jsonl"
    fourth = json.dumps({**EXAMPLES[2], "id": "again"})
    questions.write_text(data.read_text() + fourth + "\n")
    result = CliRunner().invoke(
        app,
        [
            *(
                "tune",
                str(questions),
                "--model",
                str(tiny_folder),
                "--out",
                str(tmp_path / "out"),
                "--write",
                str(file),
            ),
            *("--policies", "full_reuse,epic", "--ratios", "0.3,1", "--goal", "kl", "--bound", "1e-5"),
            *("--engine-option", "max_model_len=1024", "--engine-option", "dtype=float32", "--tenant", "us"),
        ],
    )
    assert result.exit_code == 0, result.output
    loaded = SpecCacheConfig.load(file)
    assert (loaded.policy, loaded.recompute_ratio, loaded.tenant) == ("epic", 1.0, "us")
    assert loaded.engine == "vllm" and loaded.engine_options["max_model_len"] == 1024
    assert file.read_text().startswith("# Chosen by `speccache tune` on 4 questions: kl 0.000")
