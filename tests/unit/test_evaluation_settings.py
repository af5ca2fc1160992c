"""What evaluations and benchmarks run with where nothing is said, what they refuse, and what they record of it."""

import hashlib
import json
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lopa_ascend.config import EngineConfig
from lopa_ascend.demo import DEMO_MODEL, HELD_OUT
from lopa_ascend.text.tokenizer_files import load_tokenizer
from scripts.bench import machine
from scripts.eval import described
from scripts.eval import tasks as tasks_command
from scripts.eval.command import Loader
from scripts.eval.files import DATA, TaskFileError, read_examples
from scripts.eval.sweep import Way
from scripts.eval.task_kinds import TASKS

PROBLEM = {"question": "1 + 1?", "answer": "#### 2"}


def task_file(folder: Path, name: str = "gsm8k.jsonl", count: int = 1) -> Path:
    path = folder / name
    path.write_text(f"{json.dumps(PROBLEM)}\n" * count)
    return path


# ---- examples --------------------------------------------------------------------------------------------------------


def test_generated_examples_do_not_stand_before_foreign_problems(tmp_path: Path):
    with pytest.raises(TaskFileError) as refusal:
        read_examples(TASKS["gsm8k"], tmp_path, 4)
    assert str(refusal.value).startswith(
        f"{tmp_path / 'gsm8k.examples.jsonl'}: is missing, and this project's examples"
    )
    assert read_examples(TASKS["gsm8k"], tmp_path, 0) == []
    assert len(read_examples(TASKS["gsm8k"], DATA, 4)) == len(read_examples(TASKS["gsm8k"], None, 4)) == 4
    assert len(read_examples(TASKS["mbpp"], tmp_path, 3)) == 3, "these are the usual ones"
    task_file(tmp_path, "gsm8k.examples.jsonl", 4)
    assert read_examples(TASKS["gsm8k"], tmp_path, 4) == [PROBLEM] * 4


def test_commands_refuse_generated_examples_before_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    task_file(tmp_path)
    with pytest.raises(SystemExit):
        tasks_command.main(["gsm8k", "--data", str(tmp_path), "--preset", "S13", "--model", str(tmp_path / "absent")])
    assert "gsm8k.examples.jsonl: is missing" in capsys.readouterr().err


# ---- what is recorded ------------------------------------------------------------------------------------------------


def run_evaluate(
    monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The engines, and the result file, of an evaluation that loads no weights and generates nothing: an answer has 8
    visible tokens for each lookahead branch, and one with them is right half of the time."""
    engines: list[dict[str, Any]] = []

    def load(_: Loader, engine: dict[str, Any]) -> SimpleNamespace:
        engines.append(engine)
        config = EngineConfig(**engine)
        return SimpleNamespace(
            tokenizer=load_tokenizer(DEMO_MODEL, 2048), engine=SimpleNamespace(config=config, dtype=config.dtype)
        )

    def nothing(run: tasks_command.Run, _: object, way: Way) -> tuple[dict[str, Any], dict[str, Any]]:
        branches = way.params.lookaheads
        score = 0.5 if branches else 1.0
        metrics = ("strict_match,none", "flexible_extract,none", "exact,none")
        found = {f"lopa_{name}": dict.fromkeys(metrics, score) for name in ("gsm8k", "problems")}
        answers = [SimpleNamespace(visible_tokens=8 * (1 + branches), opened_tokens=64, num_forwards=8)] * 2
        return {"results": found, "samples": {}}, dict.fromkeys(found, answers)

    monkeypatch.setattr(tasks_command, "_check_installed", lambda: None)
    monkeypatch.setattr(tasks_command.Run, "evaluated", nothing)
    monkeypatch.setattr(Loader, "load", load)
    tasks_command.main([*arguments, "--out", str(out)])
    return engines, json.loads(out.read_text())


def test_the_result_file_says_what_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    arguments = "gsm8k --preset S13 --limit 2 --examples 3 --tau-conf 0.5 --dtype bfloat16".split()
    (engine,), content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments)
    settings, (point,) = content["settings"], content["points"]
    assert (settings["preset"], settings["prompt"]["name"], settings["limit"]) == ("S13", "dream-base", 2)
    assert point["decoding"]["tau_conf"] == 0.5
    assert point["decoding"]["max_new_tokens"] == 512
    assert settings["tasks"]["gsm8k"]["examples"]["count"] == 3
    assert settings["engine"]["dtype"] == "bfloat16"
    assert settings["engine"]["max_num_seqs"] == engine["max_num_seqs"] == settings["batch_size"]
    assert settings["engine"]["seed"] == engine["seed"] == 0
    assert settings["cut"] is False
    assert content["aup"] == {}


def test_the_run_record_names_revisions_device_and_concurrency(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _, content = run_evaluate(monkeypatch, tmp_path / "out.json", "problems", "--limit", "1", "--batch-size", "3")
    record, tokenizer = content["run"], load_tokenizer(DEMO_MODEL, 2048)
    assert record["tokenizer_sha256"] == hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    assert record["chat_template_sha256"] == hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()
    assert datetime.fromisoformat(record["date"]).utcoffset() is not None
    named = {name: record[name] for name in ("device", "device_name", "ranks", "concurrency", "warmup_answers")}
    assert named == {"device": "cpu", "device_name": None, "ranks": 1, "concurrency": 3, "warmup_answers": 0}
    assert record["threads"] >= 1
    assert content["machine"]["processor"]
    assert content["settings"]["tasks"]["problems"]["sha256"] == hashlib.sha256(HELD_OUT.read_bytes()).hexdigest()


def test_a_commit_with_changes_is_said_to_have_them(tmp_path: Path):
    assert described.commit_of(tmp_path) is None

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b", *arguments], check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = described.commit_of(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("b")
    assert described.commit_of(tmp_path) == f"{commit}+changes"


def test_a_sweep_has_a_curve_for_each_number_of_branches_from_one_token_a_pass_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plot = tmp_path / "plot.svg"
    arguments = f"problems --tau-conf 0.9 0.5 --num-branches 0 3 --limit 2 --plot {plot}".split()
    _, content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments)
    first, *others = content["points"]
    taus = {name: value for name, value in first["decoding"].items() if name.startswith("tau_")}
    assert taus == {"tau_add": 1.0, "tau_act": 1.0, "tau_conf": 1.0}
    assert [point["label"] for point in (first, *others)] == [
        "one token a pass",
        "num_branches 0, tau_conf 0.9",
        "num_branches 0, tau_conf 0.5",
        "num_branches 3, tau_conf 0.9",
        "num_branches 3, tau_conf 0.5",
    ]
    assert others[-1]["tpf"]["problems"] == {"answers": 2, "summed_tpf": 4.0, "lopa_tpf": 128 / 18}
    methods = content["aup"]["problems"]["methods"]
    assert methods["bundled: lopa, blocks of 16, k = 0"]["points"] == [[1.0, 100.0]] * 3
    assert methods["bundled: lopa, blocks of 16, k = 3"]["dropped"] == [[4.0, 50.0]] * 2
    shown = capsys.readouterr().out
    assert "num_branches 3, tau_conf 0.5: problems: exact 50.0; summed TPF 4.00, LoPA's TPF 7.11 (2 problems" in shown
    assert "| bundled: lopa, blocks of 16, k = 3 | 1.00, 100.0 | 4.00, 50.0; 4.00, 50.0 | 100.0 |" in shown
    assert plot.read_text().startswith("<svg")


def test_ours_stands_beside_published_rows_of_the_same_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = "gsm8k --published dream --num-branches 0 --limit 1".split()
    _, content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments)
    assert len(content["points"]) == 2
    methods = content["aup"]["gsm8k"]["methods"]
    assert methods["bundled: lopa, blocks of 16, k = 0"]["aup"] == 100
    assert 100 < methods["LLaMA-3.1-8B-Instruct with EAGLE-3"]["aup"] < 319, "the best accuracy is ours"
    assert "commit e5bfcac (2026-05-01)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("problems --published dream", "argument --published: 'dream' has no rows for task 'problems'; it has gsm8k"),
        ("problems --plot plot.svg", "argument --plot: draws one task in several settings"),
        ("problems --plot absent/plot.svg --tau-conf 0.9 0.5", "must be a file in a folder that exists"),
        ("problems --tau-conf 0.9 1.5", "argument --tau-conf: must be a number from 0 to 1"),
    ],
)
def test_sweeps_refuse_mistakes_before_the_model(capsys: pytest.CaptureFixture[str], arguments: str, message: str):
    with pytest.raises(SystemExit, match="2"):
        tasks_command.main([*arguments.split(), "--model", "absent"])
    assert message in capsys.readouterr().err


def test_a_given_seed_goes_before_the_default_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (engine,), content = run_evaluate(monkeypatch, tmp_path / "out.json", "--seed", "7")
    assert content["settings"]["engine"]["seed"] == engine["seed"] == 7
    assert content["settings"]["preset"] is None


def test_samples_of_other_prompt_formats_or_scores_are_of_another_benchmark(monkeypatch: pytest.MonkeyPatch):
    read: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        read.append(path)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    machine.sources_digest.__wrapped__()
    assert {"presets.json", "problems.py"} <= {path.name for path in read}


def test_a_model_with_another_tokenizer_has_another_digest(tmp_path: Path):
    digests = set()
    for merges in ("a b\n", "b a\n"):
        (tmp_path / "merges.txt").write_text(merges)
        digests.add(described.describe_model(str(tmp_path), None)["model_digest"])
    assert len(digests) == 2


def test_a_directory_of_the_hubs_cache_has_its_commit(tmp_path: Path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    assert described.describe_model(str(folder), None)["model_revision"] == "0123abcd"
    assert "model_revision" not in described.describe_model(str(tmp_path), None)
