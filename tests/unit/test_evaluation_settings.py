"""What evaluations and benchmarks run with where nothing is said, what they refuse, and what they record of it."""

import json
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lopa_ascend.checkpoint import CheckpointError
from lopa_ascend.config import DecodingParams, EngineConfig
from scripts.bench import machine
from scripts.eval import described
from scripts.eval import tasks as tasks_command
from scripts.eval.command import Loader
from scripts.eval.lm_tasks import Evaluation, Point
from scripts.eval.metrics import AnswerCounts


def run_evaluate(
    monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The engines, and the result file, of an evaluation that loads no weights and generates nothing: an answer has 8
    visible tokens for each lookahead branch, and one with them is right half of the time."""
    engines: list[dict[str, Any]] = []

    def load(_: Loader, engine: dict[str, Any]) -> SimpleNamespace:
        engines.append(engine)
        return SimpleNamespace(engine=SimpleNamespace(config=EngineConfig(**engine)))

    def point(work: Evaluation, _: object, params: DecodingParams, *, has_own_length: bool) -> Point:
        scores = {name: {"exact_match,none": 0.5 if params.lookaheads else 1.0} for name in work.tasks}
        return Point(scores, {name: [AnswerCounts(8 * (1 + params.lookaheads), 64, 8)] * 2 for name in work.tasks}, {})

    monkeypatch.setattr(tasks_command, "check_installed", lambda: None)
    monkeypatch.setattr(tasks_command, "load_tasks", lambda examples, *_, **__: examples)
    monkeypatch.setattr(Evaluation, "point", point)
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
    assert settings["examples"] == {"gsm8k": 3}
    assert settings["engine"]["dtype"] == "bfloat16"
    assert settings["engine"]["max_num_seqs"] == engine["max_num_seqs"] == 8
    assert settings["engine"]["seed"] == engine["seed"] == 0
    assert settings["cut"] is False
    assert content["given"]["preset"] == "S13"
    assert content["aup"] == {}


def test_the_run_record_names_device_number_format_and_concurrency(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    arguments = "problems --limit 1 --batch-size 3 --quantization w8a8".split()
    _, content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments)
    record = content["run"]
    assert datetime.fromisoformat(record["date"]).utcoffset() is not None
    named = {name: record[name] for name in ("device", "device_name", "number_format", "ranks", "concurrency")}
    assert named == {"device": "cpu", "device_name": None, "number_format": "w8a8", "ranks": 1, "concurrency": 3}
    assert record["threads"] >= 1
    assert content["machine"]["processor"]


def test_a_preset_brings_its_tasks_with_their_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for arguments, examples in (
        ("--preset d2f-gsm8k", {"gsm8k_cot": 8}),
        ("--preset dream-humaneval", {"dream_humaneval": 0}),
        ("arc_easy", {"arc_easy": None}),
        ("arc_easy --examples 3", {"arc_easy": 3}),
    ):
        _, content = run_evaluate(monkeypatch, tmp_path / "out.json", *arguments.split())
        assert content["settings"]["examples"] == examples


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
    arguments = "problems --tau-conf 0.9 0.5 --num-branches 0 3 --limit 2".split()
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
    numbers = others[-1]["numbers"]["problems"]
    assert (numbers["answers"], numbers["summed_tpf"], numbers["lopa_tpf"]) == (2, 4.0, 128 / 18)
    methods = content["aup"]["problems"]["methods"]
    assert methods["bundled: lopa, blocks of 16, k = 0"]["points"] == [[1.0, 100.0]] * 3
    assert methods["bundled: lopa, blocks of 16, k = 3"]["dropped"] == [[4.0, 50.0]] * 2
    shown = capsys.readouterr().out
    assert (
        "num_branches 3, tau_conf 0.5: problems: exact_match,none 50.0; summed TPF 4.00, LoPA's TPF 7.11 (2 ans"
        in shown
    )
    assert "| bundled: lopa, blocks of 16, k = 3 | 1.00, 100.0 | 4.00, 50.0; 4.00, 50.0 | 100.0 |" in shown


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


def test_figures_of_other_prompt_formats_or_scores_are_of_other_sources(monkeypatch: pytest.MonkeyPatch):
    read: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        read.append(path)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    machine.sources_digest.__wrapped__()
    assert {"presets.json", "problems.py", "functions.py"} <= {path.name for path in read}


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


def test_a_digest_covers_all_parts_of_large_weights(tmp_path: Path):
    digests, weights = [], tmp_path / "model.safetensors"
    for place in (None, 0, 33 * 2**20, 64 * 2**20 - 1):
        content = bytearray(64 * 2**20)
        if place is not None:
            content[place] = 1
        weights.write_bytes(content)
        digests.append(described.describe_model(str(tmp_path), None)["model_digest"])
    assert len(set(digests)) == 4
    with pytest.raises(CheckpointError, match="nothing: expected a directory in the Hugging Face layout"):
        described.describe_model(str(tmp_path / "nothing"), None)
