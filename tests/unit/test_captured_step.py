"""A step added up from captured tasks: its page has what the command prints, and its parts add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.__main__ import main
from scripts.bench.plan.captured import captured_sequences, predict_captured, tasks_of
from scripts.bench.plan.devices import known_devices, load_device

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--captured"]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_the_device_is_the_sum_of_its_terms_and_the_step_the_longer_of_device_and_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan", "--captured", "--json"])
    columns = json.loads(capsys.readouterr().out)
    assert {found["sequences"] for found in columns.values()} == {1, 4, 16}
    for found in columns.values():
        terms = [found[name] for name in ("products", "attention", "collectives", "small_kernels")]
        assert found["device"] == pytest.approx(sum(terms))
        assert found["step"] == max(found["device"], found["host"])
        assert found["tasks"] > 28 * 11


def test_the_planner_counts_the_tasks_outside_the_layers_that_are_captured() -> None:
    _, outside = tasks_of(1)
    assert {load_device(name).other_kernels for name in known_devices()} == {len(outside)}


def test_longer_contexts_and_dearer_collectives_cost_more() -> None:
    device = load_device("910c")
    one = predict_captured(1, device, 512, "optimistic")
    assert predict_captured(1, device, 8192, "optimistic").attention > one.attention
    assert predict_captured(1, device, 512, "pessimistic").collectives > one.collectives


def test_the_page_names_the_tokens_of_sixteen_sequences() -> None:
    layer, _ = tasks_of(16)
    flops = next(flops for name, _, flops in layer if name == "aten::addmm")  # for q, k and v: 3584 x (7 + 2) heads
    assert flops == 2 * 1024 * 3584 * 9 * 128
    assert "of 1,024 tokens a rank" in " ".join(PAGE.read_text().split())


def test_a_host_that_does_not_work_ahead_adds_its_time() -> None:
    fast = replace(load_device("910c"), host_overlaps=0.0, host_launch_s=0.0)
    after = predict_captured(1, fast, 512, "optimistic")
    assert after.step == after.device + after.host
    assert after.bound_by == "products"
    slow = replace(load_device("910c"), host_overlaps=0.0, host_launch_s=0.005)
    assert predict_captured(1, slow, 512, "optimistic").bound_by == "host"


@pytest.mark.parametrize("more", [[], ["--constants"]])
def test_a_device_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--captured", "--device", "910d", *more])
    assert stop.value.code == 2
    assert "unknown device '910d'; choose one of 910c, h200, h100, b200, rtx4090" in capsys.readouterr().err


def test_other_tasks_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"layer": [["aten::mm", 1_600_000, 2]], "outside": [["aten::copy_", 0, 0]]}
    (tmp_path / "tasks.json").write_text(json.dumps({"2": step}))
    assert captured_sequences(tmp_path / "tasks.json") == [2]
    main(["plan", "--captured", str(tmp_path / "tasks.json"), "--json"])
    found = json.loads(capsys.readouterr().out)["2, optimistic"]
    assert found["tasks"] == 28 + 1
    assert found["products"] == pytest.approx(28 * (1.6 / 1.6 / 0.6 * 1e-3 + 5e-3))
    assert found["small_kernels"] == pytest.approx(2e-3)


@pytest.mark.parametrize("flags", ["--tp 2", "--dies 16", "--k 3", "--tpf 5"])
def test_sizes_that_were_not_captured_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--captured", *flags.split()])
    assert f"leave {flags.split()[0]} out" in capsys.readouterr().err


def test_what_was_not_captured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="sequences: 3 is not in captured.json; choose one of 1, 4, 16"):
        predict_captured(3, load_device("910c"), 512, "optimistic")
    with pytest.raises(SystemExit):
        main(["plan", "--captured", "--context", "-1"])
    assert "--context: must be a whole number from 0 on, got '-1'" in capsys.readouterr().err
