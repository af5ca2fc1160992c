"""Which versions the NPU backend takes; the table in backend/npu/versions.py was read off the wheels."""

from __future__ import annotations

import pytest

from lopa_ascend.backend.npu.environment import check_environment
from lopa_ascend.backend.npu.versions import (
    UnsupportedStackError,
    can_run,
    check_cann,
    check_installed,
    check_versions,
    driver_order,
)

RUNS = {
    "2.8.0.post4": (),
    "2.9.0": (),
    "2.9.0.post2": ("eager", "npugraph_ex"),
    "2.9.0.post4": ("eager", "npugraph_ex"),
    "2.9.0.post6": ("eager", "npugraph_ex", "ge"),
    "2.9.1": ("eager", "npugraph_ex"),
    "2.10.0": ("eager", "npugraph_ex"),
    "2.10.0.post2": ("eager", "npugraph_ex"),
    "2.10.0.post4": ("eager", "npugraph_ex", "ge"),
    "2.11.0": ("eager", "npugraph_ex", "ge"),
    "2.13.0+git1234": ("eager", "npugraph_ex", "ge"),
}


@pytest.mark.parametrize(("version", "modes"), RUNS.items())
def test_a_version_runs_the_modes_that_its_wheel_has(version: str, modes: tuple[str, ...]) -> None:
    assert tuple(mode for mode in ("eager", "npugraph_ex", "ge") if can_run(version, mode)) == modes


def test_a_stack_that_fits_is_taken() -> None:
    check_versions("2.13.0+cpu", "2.13.0", "ge")
    check_versions("2.9.0", "2.9.0.post6", "ge")
    for cann in ("9.0.0", "9.0.RC1", "9.1.0", "10.0"):
        check_cann(cann)


def test_a_version_too_old_is_refused_with_those_that_are_not() -> None:
    with pytest.raises(
        UnsupportedStackError, match=r"torch_npu 2\.8\.0 cannot .* install 2\.9\.0\.post2, 2\.9\.1, 2\.10\.0 or 2\.11"
    ):
        check_versions("2.8.0", "2.8.0", "eager")
    with pytest.raises(UnsupportedStackError, match="or newer, or choose another mode: eager, npugraph_ex$"):
        check_versions("2.10.0", "2.10.0.post2", "ge")
    with pytest.raises(UnsupportedStackError, match=r"CANN 8\.5\.0 is too old: it must be 9\.0 or newer"):
        check_cann("8.5.0")


def test_two_releases_do_not_go_together() -> None:
    with pytest.raises(UnsupportedStackError, match=r"torch 2\.12\.1 and torch_npu 2\.12\.0 are not of one release"):
        check_versions("2.12.1", "2.12.0", "eager")


def test_drivers_are_sorted_as_torch_npu_sorts_them() -> None:
    in_order = [
        "24.1.rc3.7",
        "25.0.T1",
        "25.0.RC1",
        "25.0.rc1.1",
        "25.0.RC2",
        "25.0.0",
        "25.0.0.1",
        "25.5.1",
        "26.0.RC1",
    ]
    assert sorted(set(in_order), key=driver_order) == in_order
    assert driver_order("25.0.RC1") == driver_order("25.0.rc1")


def test_every_variable_that_is_in_the_way_is_named() -> None:
    wrong = {"TASK_QUEUE_ENABLE": "2", "PYTORCH_NPU_ALLOC_CONF": "pin_memory_expandable_segments:True"}
    with pytest.raises(UnsupportedStackError, match=r"TASK_QUEUE_ENABLE is '2'.*\. PYTORCH_NPU_ALLOC_CONF is 'pin"):
        check_environment(wrong, "npugraph_ex")
    check_environment(wrong, "eager")
    check_environment({}, "npugraph_ex")


def test_an_unknown_mode_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fast'; choose one of eager, npugraph_ex, ge"):
        check_versions("2.13.0", "2.13.0", "fast")


def test_without_torch_npu_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        from importlib.metadata import PackageNotFoundError

        if name == "torch_npu":
            raise PackageNotFoundError(name)
        return "2.13.0"

    monkeypatch.setattr("lopa_ascend.backend.npu.versions.metadata.version", version)
    with pytest.raises(UnsupportedStackError, match="device npu needs torch_npu, which is not installed"):
        check_installed("eager")


@pytest.mark.parametrize("cann", ["", "\x7f", "9.0.0"])
def test_a_cann_that_nobody_can_name_is_taken(monkeypatch: pytest.MonkeyPatch, cann: str) -> None:
    monkeypatch.setattr("lopa_ascend.backend.npu.versions.metadata.version", lambda name: "2.13.0")
    monkeypatch.setattr("lopa_ascend.backend.npu.versions.cann_version", lambda: cann)
    check_installed("eager")
