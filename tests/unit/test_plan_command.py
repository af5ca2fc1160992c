"""The planner's data, the paper's rows beside predictions, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import ConfigError
from lopa_ascend.demo import DEMO_MODEL
from scripts.bench.__main__ import main
from scripts.bench.plan import devices
from scripts.bench.plan.devices import DeviceError, load_device, parse_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.validate import read_paper, validate

PAGE = Path(__file__).parents[2] / "docs" / "results.md"

# ---- data and models -------------------------------------------------------------------------------------------------


def test_devices_are_described_whole_and_with_sources():
    assert devices.known_devices() == ("910c", "h200", "h100", "b200", "rtx4090")
    for name in devices.known_devices():
        assert load_device(name).memory_efficiency < 1
    with pytest.raises(DeviceError, match="910c, h200, h100, b200, rtx4090"):
        load_device("910d")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"bf16_flops": [1.0, "FLOP/s"]}, "bf16_flops"),
        ({"bf16_flops": [1.0, "FLOP/s", ""]}, "source"),
        ({"bf16_flops": [0, "FLOP/s", "s"]}, "above 0"),
        ({"bf16_flops": [True, "FLOP/s", "s"]}, "above 0"),
        ({"memory_efficiency": [1.5, "", "s"]}, "at most 1"),
        ({"collective_s": [-1, "s", "s"]}, "at least 0"),
        ({"speed": [1, "", "s"]}, "unknown constant 'speed'"),
        ({"memory_bandwidth": [1600, "GB/s", "s"]}, "memory_bandwidth is in 'GB/s', expected 'B/s'"),
        ({"collective_s": [10, "us", "s"]}, "collective_s is in 'us', expected 's'"),
        ({"bf16_flops": [353.9, "TFLOP/s", "s"]}, "bf16_flops is in 'TFLOP/s', expected 'FLOP/s' or 'OP/s'"),
        ({"memory_bytes": [64, None, "s"]}, "memory_bytes is in None, expected 'B'"),
        ({"link_efficiency": [70, "%", "s"]}, "link_efficiency is in '%', expected ''"),
    ],
)
def test_broken_descriptions_name_the_constant(change: dict[str, object], expected: str):
    constants = json.loads(devices.FILE.read_text())["910c"]["constants"]
    assert parse_device({"constants": constants}, "file") == load_device("910c")
    with pytest.raises(DeviceError, match=expected):
        parse_device({"constants": constants | change}, "file")


def test_a_device_may_come_from_a_file(tmp_path: Path):
    description = json.loads(devices.FILE.read_text())["h200"]
    description["constants"]["memory_bandwidth"][0] = 1e12
    (tmp_path / "d.json").write_text(json.dumps(description))
    assert load_device(str(tmp_path / "d.json")).memory_bandwidth == 1e12


def test_models_are_names_or_directories():
    assert load_model(str(DEMO_MODEL)).hidden_size == 192
    assert load_model("DiffuCoder-7B").num_layers == 28
    with pytest.raises(ConfigError, match="Dream-7B"):
        load_model("Dream-8B")


# ---- the paper's rows ------------------------------------------------------------------------------------------------


def test_validate_has_a_row_for_each_of_the_papers(capsys: pytest.CaptureFixture[str]):
    main(["plan", "--validate"])
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    rows = json.loads(output)["rows"]
    keys = [(row["setting"], row["model"], row["task"]) for row in rows]
    assert len(set(keys)) == len(keys) == 18 * 2 * 2
    assert {key[0] for key in keys} == {f"S{n}" for n in range(1, 19)}
    for row in rows:
        assert row["predicted_over_published"] == pytest.approx(row["predicted"] / row["published"], rel=1e-3)
        assert row["predicted_pessimistic"] <= row["predicted"] <= row["predicted_optimistic"]
        assert row["tpf_source"]
    published = {key: row["published"] for key, row in zip(keys, rows, strict=True)}
    assert published["S13", "D2F-Dream-Base", "MBPP"] == 615.74
    assert published["S12", "D2F-Dream-Instruct", "GSM8K"] == 609.90


def test_the_page_has_the_rows_as_they_are_predicted():
    groups = {"S1-S6, H200, BP 4": (1, 6), "S7-S12, H200, BP 8": (7, 12), "S13-S18, 910C, TP 4 x BP 4": (13, 18)}
    lines = []
    for title, (first, last) in groups.items():
        for model in ("Base", "Instruct"):
            numbers = {f"S{number}" for number in range(first, last + 1)}
            rows = [row for row in validate() if row["setting"] in numbers and row["model"].endswith(model)]
            digits = {"optimistic": 1, "pessimistic": 2 if first == 13 else 1}
            cells = [span(rows, f"{case}_over_published", digits[case]) for case in digits]
            times = f"{span(rows, 'published_step_ms', 1)} ms"
            lines.append(f"| {title if model == 'Base' else ''} | {model} | {' | '.join(cells)} | {times} |")
    assert "\n".join(lines).replace("|  |", "| |") in PAGE.read_text()


def span(rows: list[dict[str, Any]], name: str, digits: int) -> str:
    """The lowest and the highest value of some rows."""
    values = [row[name] for row in rows]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def test_a_rows_own_speed_is_not_what_it_is_predicted_from(monkeypatch: pytest.MonkeyPatch):
    before = {(row["setting"], row["model"], row["task"]): row for row in validate()}
    paper = read_paper()
    changed = next(row for row in paper["rows"] if row["setting"] == "S14")
    changed["avg_tps"] *= 2
    monkeypatch.setattr("scripts.bench.plan.validate.read_paper", lambda: paper)
    for row in validate():
        if row["setting"] == "S14":
            assert row["predicted"] == before[row["setting"], row["model"], row["task"]]["predicted"]


def test_tokens_per_forward_of_table_3_are_taken_as_they_are():
    rows = {(row["setting"], row["model"], row["task"]): row for row in validate()}
    assert rows["S18", "D2F-Dream-Base", "MBPP"]["tpf"] == 11.92
    assert rows["S12", "D2F-Dream-Instruct", "GSM8K"]["tpf_source"] == "Table 3"
    assert rows["S6", "D2F-Dream-Base", "MBPP"]["tpf"] == 11.92
    # 11.92 x 415.19 / 678.26, the tokens/s of S1 and S6
    assert rows["S13", "D2F-Dream-Base", "MBPP"]["tpf"] == pytest.approx(7.297, abs=1e-3)
    assert rows["S7", "D2F-Dream-Base", "MBPP"]["tpf_source"] == "estimated: TPF of S12 x tokens/s of S13 / S18"


def test_the_constants_are_printed_with_their_sources(capsys: pytest.CaptureFixture[str]):
    main(["plan", "--device", "h200", "--constants"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(devices.CONSTANTS)
    assert "| memory_bandwidth | 4.8e+12 B/s | NVIDIA data sheet, by secondary sources |" in lines


# ---- the command -----------------------------------------------------------------------------------------------------


def test_one_plan_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]):
    arguments = "--tp 4 --bp 4 --k 3 --precision w8a8 --tpf 11.92".split()
    main(["plan", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["tp"], found["bp"], found["k"], found["tpf"]) == (4, 4, 3, 11.92)
    speed = found["optimistic"]["tokens_per_second"]
    assert speed == pytest.approx(11.92 / found["optimistic"]["step_ms"] * 1000, rel=1e-3)
    main(["plan", *arguments])
    table = capsys.readouterr().out
    assert f"| {speed:.0f} |" in table
    assert "bound by" in table


def test_the_best_plan_uses_no_more_dies_than_there_are(capsys: pytest.CaptureFixture[str]):
    main(["plan", "--dies", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["dies"] <= 4


def test_sizes_that_are_given_beside_the_dies_are_kept_and_the_others_found(capsys: pytest.CaptureFixture[str]):
    found = {}
    for options in ("", "--tp 4", "--bp 4", "--tp 4 --bp 4", "--tp 4 --k 3"):
        main(["plan", "--dies", "16", "--json", *options.split()])
        found[options] = json.loads(capsys.readouterr().out)
    speed = {options: plan["optimistic"]["tokens_per_second"] for options, plan in found.items()}
    assert found["--tp 4"]["tp"] == 4
    assert found["--tp 4"]["bp"] > 1
    assert found["--bp 4"]["bp"] == 4
    assert (found["--tp 4 --bp 4"]["tp"], found["--tp 4 --bp 4"]["bp"]) == (4, 4)
    assert (found["--tp 4 --k 3"]["tp"], found["--tp 4 --k 3"]["k"]) == (4, 3)
    assert found["--tp 4 --k 3"]["bp"] > 1
    assert max(speed["--tp 4 --bp 4"], speed["--tp 4 --k 3"]) <= speed["--tp 4"] <= speed[""]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--tp 3", "1, 2, 4"),
        ("--dies 16 --tp 3", "1, 2, 4"),
        ("--dies 16 --tp 4 --bp 8 --k 7", "32 dies"),
        ("--dies 16 --bp 8 --k 3", "bp is at most k + 1"),
        ("--dies 2 --tp 4", "needs 4 dies, there are 2"),
        ("--tp 0", "from 1 on"),
        ("--k 20", "0:3.1, 14:10.1"),
        ("--tpf 5", "--k"),
        ("--tpf 5 3:6 --k 3", "one number"),
        ("--tpf x", "K:NUMBER"),
        ("--tpf -1", "above 0"),
        ("--dies 16 --tp 4 --bp 8", "32 dies"),
        ("--device a100", "910c"),
        ("--model Dream-8B", "Dream-7B"),
        ("--context 3000000 --dies 1", "fits on no"),
    ],
)
def test_wrong_command_lines_are_refused(capsys: pytest.CaptureFixture[str], argv: str, expected: str):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *argv.split()])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
