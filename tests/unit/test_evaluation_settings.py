"""What evaluations and benchmarks run with where nothing is said, what they refuse, and what they record of it."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import machine
from scripts.eval import described
from scripts.eval import tasks as tasks_command
from scripts.eval.files import DATA, TaskFileError, read_examples
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


def run_evaluate(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the model, and the result file, of an evaluation that generates nothing."""
    options: dict[str, Any] = {}

    def nothing(
        args: argparse.Namespace, jobs: list[tasks_command.Job], _foreign: object, _prompt: object,
        given: dict[str, Any], *, cut: bool,
    ) -> dict[str, Any]:  # fmt: skip
        options.update(given)
        metrics = ("strict_match,none", "flexible_extract,none")
        return {"results": {f"lopa_{job.task.name}": dict.fromkeys(metrics, 0.5) for job in jobs}, "samples": {}}

    monkeypatch.setattr(tasks_command, "_check_installed", lambda: None)
    monkeypatch.setattr(tasks_command, "_simple_evaluate", nothing)
    tasks_command.main([*arguments, "--out", str(out)])
    return options, json.loads(out.read_text())


def test_the_result_file_says_what_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    arguments = [
        "gsm8k",
        "--preset",
        "S13",
        "--limit",
        "2",
        "--examples",
        "3",
        "--tau-conf",
        "0.5",
        "--dtype",
        "bfloat16",
    ]
    options, content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments)
    settings = content["settings"]
    assert (settings["preset"], settings["prompt"]["name"], settings["limit"]) == ("S13", "dream-base", 2)
    assert settings["decoding"]["tau_conf"] == 0.5
    assert settings["decoding"]["max_new_tokens"] == 512
    assert settings["tasks"]["gsm8k"]["examples"]["count"] == 3
    assert settings["engine"]["dtype"] == "bfloat16"
    assert settings["engine"]["max_num_seqs"] == options["max_num_seqs"] == settings["batch_size"]
    assert settings["engine"]["seed"] == options["seed"] == 0
    assert settings["cut"] is False


def test_a_given_seed_goes_before_the_default_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    options, content = run_evaluate(monkeypatch, tmp_path / "out.json", "--seed", "7")
    assert content["settings"]["engine"]["seed"] == options["seed"] == 7
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
