"""The planner on this CPU: with models so small that only the form of the figures counts."""

import json
from pathlib import Path

from scripts.bench.plan import cpu
from scripts.bench.plan.devices import load_device, parse_device
from scripts.bench.plan.step import layer_parameters

SMALL, NARROW = (cpu.Size(64, 2, 64),), (cpu.Size(32, 1, 64), cpu.Size(32, 3, 64))


def test_this_cpu_is_described_like_any_device(tmp_path: Path):
    description = cpu.measure_cpu(NARROW, elements=2**18)
    device = parse_device(description, "this CPU")
    assert device.fp32_flops > 1e8
    assert device.memory_bandwidth > 1e8
    assert device.host_overlaps == 0
    (tmp_path / "cpu.json").write_text(json.dumps(description))
    assert load_device(str(tmp_path / "cpu.json")) == device


def test_a_measured_step_computes_four_rows_of_a_block():
    measured = cpu.measure_step(SMALL[0], repetitions=1)
    assert measured.seconds > 0
    assert 24 <= measured.work.window <= 36  # 32, but the prompt's pass and the last passes have fewer rows
    assert layer_parameters(measured.model) == 64 * 32 * (2 + 2) + 64 * 64 + 3 * 64 * 192


def test_rows_of_predictions_and_measurements():
    found = cpu.validate_cpu(SMALL, NARROW)
    (row,) = found["rows"]
    assert (row["hidden"], row["layers"]) == (64, 2)
    assert abs(row["predicted_over_measured"] - row["predicted_ms"] / row["measured_ms"]) < 0.05
    assert row["within_tolerance"] == (abs(row["predicted_over_measured"] - 1) <= 0.25)
    parse_device(found["device"], "this CPU")
