"""The benchmark's command on the bundled model."""

import csv
import json
from pathlib import Path
from unittest import mock

import pytest

from lopa_ascend.backend.compiler import Eager
from lopa_ascend.graph import setup
from scripts import benchmark
from scripts.benchmarking.samples import SAMPLES

SWEEP = ("--sweep", "num_branches=0,3", "--limit", "2", "--runs", "2", "--warmup", "0", "--threads", "1")


def identities(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (path / SAMPLES).read_text().splitlines()]
    return [(line["setting"], line["run"], line["index"]) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    benchmark.main([*SWEEP, "--max-new-tokens", "96", "--out", str(folder)])
    return folder


def test_every_answer_is_measured(whole: Path):
    lines = [json.loads(line) for line in (whole / SAMPLES).read_text().splitlines()]
    assert len(set(identities(whole))) == len(lines) == 2 * 2 * 2
    for line in lines:
        assert 0 < line["first_seconds"] < line["seconds"]
        assert 0 < line["forward_seconds"] < line["seconds"]
        assert len(line["filled"]) == line["num_forwards"]
        assert sum(line["filled"]) >= line["visible_tokens"] > 0
        assert line["opened_tokens"] >= line["visible_tokens"]
        assert line["pages"] > 0
    with (whole / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["num_branches"] for row in rows] == ["0", "3"]
    assert float(rows[1]["user_tpf"]) > float(rows[0]["user_tpf"]) > 1
    assert "| num_branches=3 |" in (whole / "results.md").read_text()
    header = json.loads((whole / "benchmark.json").read_text())
    assert header["machine"]["versions"]["torch"]
    assert header["model"] == "bundled"


def test_an_interrupted_run_goes_on(whole: Path):
    lines = (whole / SAMPLES).read_text().splitlines(keepends=True)
    (whole / SAMPLES).write_text("".join(lines[:3]) + lines[3][:20])
    benchmark.main([*SWEEP, "--max-new-tokens", "96", "--out", str(whole)])
    after = (whole / SAMPLES).read_text().splitlines(keepends=True)
    assert after[:3] == lines[:3]
    answers = [
        [(a["setting"], a["run"], a["index"], a["text"]) for a in map(json.loads, part)] for part in (lines, after)
    ]
    assert answers[0] == answers[1]


def test_another_prompt_needs_another_folder(whole: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        benchmark.main([*SWEEP, "--prompt", "plain", "--out", str(whole)])
    assert "whose prompt is chat, but this one's is plain" in capsys.readouterr().err


def test_figures_are_drawn(whole: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    benchmark.main([*SWEEP, "--max-new-tokens", "96", "--out", str(whole), "--plots", str(tmp_path)])
    names = {"benchmark-branches.png", "benchmark-steps.png", "benchmark-pareto.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_a_preset_brings_its_prompt_which_the_model_must_be_able_to_make(tmp_path: Path, capsys):
    arguments = ["--preset", "S13", "--limit", "1", "--runs", "1", "--examples", "0", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert "argument --prompt: dream-base begins with a BOS token" in capsys.readouterr().err


def test_with_compiled_steps_the_hosts_work_and_padding_are_measured(tmp_path: Path):
    """The step is one function here as it is with inductor, which takes minutes to compile it."""
    arguments = ["--limit", "1", "--runs", "1", "--warmup", "1", "--max-new-tokens", "32", "--max-model-len", "256"]
    arguments += ["--graph-mode", "inductor", "--graph-window-blocks", "2", "--max-num-seqs", "1", "--threads", "1"]
    with mock.patch.object(setup, "load_compiler", return_value=Eager()):
        benchmark.main([*arguments, "--out", str(tmp_path)])
    (line,) = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert line["forward_seconds"] is None
    assert 0 < line["host_seconds"] < line["seconds"]
    assert 0 < line["padded_tokens"] < line["graph_tokens"]
    with (tmp_path / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["outside_share"] == ""
    assert 0 < float(row["host_share"]) < 1
