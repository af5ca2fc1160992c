"""The planner's data, the paper's rows beside predictions, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import ConfigError
from lopa_ascend.demo import DEMO_MODEL
from scripts.bench.__main__ import main
from scripts.bench.plan import devices
from scripts.bench.plan.devices import DeviceError, load_device
from scripts.bench.plan.measured import Fit, Measured, compare, fit
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import ENDS, floor, predict
from scripts.bench.plan.tasks import Workload
from scripts.bench.plan.validate import published_engine, read_paper, validate

PAGE = Path(__file__).parents[2] / "docs" / "results.md"

# ---- data and models -------------------------------------------------------------------------------------------------


UNITS = {"flops": ("FLOP/s", "OP/s"), "bandwidth": ("B/s",), "bytes": ("B",), "_s": ("s",)}
"""By the end of a constant's name; all others are plain numbers."""
DIVISORS = ("bandwidth", "bytes", "efficiency", "sms", "rows", "splits")
"""Constants that may not be 0, by the end of their names."""


def test_devices_are_described_whole_and_with_sources():
    assert devices.known_devices() == ("910c", "h200", "h100", "a100", "b200", "rtx4090", "xeon")
    described = json.loads(devices.FILE.read_text())
    for name in devices.known_devices():
        constants = described[described[name].get("like", name)]["constants"] | described[name]["constants"]
        has_sms = "sms" in constants
        assert constants.keys() == {*devices.CONSTANTS, *(devices.GPU_CONSTANTS if has_sms else ())}
        for constant, (value, unit, source) in constants.items():
            ends = value if isinstance(value, list) else [value, value]
            assert len(ends) == 2
            assert source
            units = next((units for end, units in UNITS.items() if constant.endswith(end)), ("",))
            assert unit in units or not any(ends), (name, constant)
            assert min(ends) > 0 if constant.endswith(DIVISORS) else min(ends) >= 0, (name, constant)
            assert max(ends) <= 1 or not constant.endswith("efficiency"), (name, constant)
        assert load_device(name).high.memory_efficiency < 1
    with pytest.raises(DeviceError, match="910c, h200, h100, a100, b200, rtx4090, xeon"):
        load_device("910d")


REPORT: dict[str, Any] = {
    "findings": [],
    "tensor_parallel_size": 4,
    "parts": {
        "products_bytes": 120e6,
        "products_us": 100.0,
        "attention_bytes": 1.2e6,
        "attention_us": 21.0,
        "small_us": 2.5,
    },
    "updates_us": {
        "0": {"kept": 900.0, "changed": 2300.0, "changed by a thread": 2400.0},
        "1": {"kept": 800.0, "changed": 4000.0, "changed by a thread": 2480.0},
    },
    "all_reduce_us": {
        "tp, captured": {"65536": 20.0, "1048576": 40.0},
        "bp, captured": {"1024": 130.0, "65536": 140.0},
    },
}


def test_a_report_of_the_self_test_replaces_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    measured = load_device(str(tmp_path / "report.json"))
    for device in measured:
        assert device.memory_efficiency == pytest.approx(1.2e12 / 1.6e12)
        assert device.attention_kernel_s == pytest.approx(20e-6)
        assert device.vector_kernel_s == pytest.approx(2.5e-6)
        assert device.gap_s == device.matrix_kernel_s == 0
        assert device.host_layer_s == pytest.approx(1400e-6 / 28)
        assert device.host_launch_s == pytest.approx(800e-6)
        assert device.slow_collective_s == pytest.approx(130e-6)
        assert device.measured_sum(4, 557056) == pytest.approx(30e-6)
        assert device.measured_sum(2, 557056) is device.measured_sum(4, 1) is None
    main(["plan", "--device", str(tmp_path / "report.json"), *"--tp 4 --bp 4 --window 64 --context 512".split()])
    assert "| collectives | 1." in capsys.readouterr().out
    main(["plan", "--device", str(tmp_path / "report.json"), "--constants"])
    assert f"| gap_s | 0 s | {tmp_path / 'report.json'} |" in capsys.readouterr().out


def test_what_a_report_lacks_stays_a_range(tmp_path: Path):
    (tmp_path / "report.json").write_text(json.dumps(REPORT | {"parts": {}, "updates_us": {}, "all_reduce_us": {}}))
    assert load_device(str(tmp_path / "report.json")) == load_device("910c")
    (tmp_path / "report.json").write_text(json.dumps({"findings": []}))
    with pytest.raises(DeviceError, match="not a report of this version's self-test"):
        load_device(str(tmp_path / "report.json"))


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
        assert row["predicted_slowest"] <= row["predicted"] <= row["predicted_fastest"]
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
            digits = {"fastest": 1, "slowest": 2 if first == 13 else 1}
            cells = [span(rows, f"{case}_over_published", digits[case]) for case in digits]
            times = f"{span(rows, 'published_step_ms', 1)} ms"
            lines.append(f"| {title if model == 'Base' else ''} | {model} | {' | '.join(cells)} | {times} |")
    assert "\n".join(lines).replace("|  |", "| |") in PAGE.read_text()


def test_the_page_has_the_engine_that_was_published_and_its_range_holds_every_row():
    rows = published_engine()
    assert len(rows) == 24
    lines = []
    for term in ("step", "host", "lengths", "prompt", "engine"):
        cells = [span([row[end] for row in rows], term, 1) for end in ("fastest_ms", "slowest_ms")]
        lines.append(" | ".join(low if low == high else cell for cell in cells for low, _, high in [cell.split()]))
    page = PAGE.read_text()
    assert all(f" | {line} |\n" in page for line in lines)
    for row in rows:
        assert row["fastest_ms"]["engine"] < row["published_step_ms"] < row["slowest_ms"]["engine"]
        for end in (row["fastest_ms"], row["slowest_ms"]):
            assert sum(end.values()) == pytest.approx(2 * end["engine"], abs=0.01)


def test_measured_steps_of_others_lie_within_their_predictions():
    found = compare()
    page = PAGE.read_text()
    for row in found["rows"]:
        assert row["fastest_ms"] < row["step_ms"] < row["slowest_ms"]
        assert abs(row["left_out_error"]) < 0.09
        times = f"{row['step_ms']:.2f} | {row['fastest_ms']:.1f} to {row['slowest_ms']:.1f}"
        assert f"| {times} | {100 * row['left_out_error']:+.0f} % |" in page
    assert 0.7 < found["memory_efficiency"] < 0.8


def test_a_fit_finds_what_rows_were_made_with():
    made = Fit(0.72, 0.8)
    rows = [Measured(memory / 0.72 + 0.8 * fixed + 1, memory, fixed, 1) for memory, fixed in ((9, 3), (5, 3), (4, 4))]
    assert fit(rows) == pytest.approx(made)
    assert made.error(rows[0]._replace(step=2 * rows[0].step)) == pytest.approx(-0.5)


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
    assert len(lines) == 2 + len(devices.CONSTANTS) + len(devices.GPU_CONSTANTS)
    assert "| memory_bandwidth | 4.8e+12 B/s | NVIDIA data sheet, by secondary sources |" in lines


def test_the_page_has_the_step_that_the_command_prints(capsys: pytest.CaptureFixture[str]):
    main(["plan", *"--tp 4 --bp 4 --window 64 --context 512 --requests 1 4 8 16".split()])
    assert capsys.readouterr().out.partition("\n\n")[2].strip() in PAGE.read_text()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_one_plan_as_json_and_as_a_table(capsys: pytest.CaptureFixture[str]):
    arguments = "--tp 4 --bp 4 --k 3 --precision w8a8 --tpf 3:11.92".split()
    main(["plan", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["tp"], found["bp"], found["k"], found["tpf"]) == (4, 4, 3, 11.92)
    speed = found["low"]["tokens_per_second"]
    assert speed == pytest.approx(11.92 / found["low"]["step_ms"] * 1000, rel=1e-3)
    main(["plan", *arguments])
    table = capsys.readouterr().out
    assert f" to {speed:.0f} |" in table
    assert "bound by" in table


def test_the_best_plan_uses_no_more_dies_than_there_are(capsys: pytest.CaptureFixture[str]):
    main(["plan", "--dies", "4", "--json"])
    assert json.loads(capsys.readouterr().out)["dies"] <= 4


def test_sizes_that_are_given_beside_the_dies_are_kept_and_the_others_found(capsys: pytest.CaptureFixture[str]):
    found = {}
    for options in ("", "--tp 4", "--bp 4", "--tp 4 --bp 4", "--tp 4 --k 3"):
        main(["plan", "--dies", "16", "--json", *options.split()])
        found[options] = json.loads(capsys.readouterr().out)
    speed = {
        options: plan["low"]["tokens_per_second"] * plan["high"]["tokens_per_second"] for options, plan in found.items()
    }
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
        ("--tpf 5", "must be K:X, got '5'"),
        ("--tpf x:5", "from 0 on"),
        ("--tpf 3:-1", "above 0"),
        ("--dies 16 --tp 4 --bp 8", "32 dies"),
        ("--device v100", "910c"),
        ("--device a100 --precision fp8", "no products in fp8"),
        ("--computed 1.5", "at most 1"),
        ("--model Dream-8B", "Dream-7B"),
        ("--context 3000000 --dies 1", "no (tp, bp, k) is possible: tp 1 x bp 1 needs"),
    ],
)
def test_wrong_command_lines_are_refused(capsys: pytest.CaptureFixture[str], argv: str, expected: str):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *argv.split()])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_page_on_gpus_has_what_is_predicted():
    """Without a format a card's cell is empty."""
    model, page = load_model("Dream-7B"), PAGE.with_name("cuda.md").read_text()
    for name in ("h200", "h100", "a100", "b200", "rtx4090"):
        card, cells = load_device(name), list[str]()
        for fields in ({}, {"precision": "w8a8"}, {"precision": "fp8"}, {"computed": 0.75}):
            if fields == {"precision": "fp8"} and not card.low.fp8_flops:
                cells.append("")
                continue
            steps = predict(model, card, Workload(k=7, window=64, context=448, **fields))
            cells.append(" to ".join(f"{1e3 * steps[end].device:.1f}" for end in ENDS))
        cells.insert(1, f"{1e3 * floor(model, card.low, Workload(k=7, window=64, context=448)):.1f}")
        assert f"| {name} | {' | '.join(cells)} |\n".replace("|  |", "| |") in page
