"""The predicted step: its page has what the command prints, and its parts add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.npu_predict import main, predict, tasks_of
from scripts.planner.devices import known_devices, load_device

PAGE = Path(__file__).parents[2] / "docs" / "predicted-step.md"


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text()


def test_the_device_is_the_sum_of_its_terms_and_the_step_the_longer_of_device_and_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--json"])
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
    one = predict(1, device, 512, "optimistic")
    assert predict(1, device, 8192, "optimistic").attention > one.attention
    assert predict(1, device, 512, "pessimistic").collectives > one.collectives


def test_what_was_not_captured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="sequences: 3 is not in captured.json; choose one of 1, 4, 16"):
        predict(3, load_device("910c"), 512, "optimistic")
    with pytest.raises(SystemExit):
        main(["--context", "-1"])
    assert "--context: must be at least 0, got -1" in capsys.readouterr().err
