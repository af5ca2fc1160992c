"""scripts/env.sh, with a stand-in for Python that only writes down what it is asked for."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$2" in
venv)
    rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "$4" >"$4/bin/activate" && echo venv >>"$LOG"
    ;;
pip)
    sleep 0.3 && [ -e "$VIRTUAL_ENV/bin/activate" ] && echo pip >>"$LOG" && echo "$6" >>"$LOG.packages"
    ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What of a checkout an environment depends on."""
    for name in ("pyproject.toml", "setup.py", "scripts/env.sh", "lopa_ascend/backend/cpu/native"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def set_up(checkout: Path, **variables: str) -> subprocess.Popen[str]:
    script = f'set -eu; source "{checkout}/scripts/env.sh"; use_env "{checkout}"; command -v python'
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "python"), "LOG": str(checkout / "log")}
    environment |= variables
    return subprocess.Popen(
        ["bash", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_one_of_two_scripts_sets_the_environment_up_and_the_other_waits(checkout: Path):
    first = set_up(checkout)
    while not (checkout / "log").exists():
        assert first.poll() is None
    second = set_up(checkout)
    outputs = [process.communicate(timeout=30) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert [output.strip() for output, _ in outputs] == [f"{checkout}/.venv/bin/python"] * 2
    assert "waiting for another script" in outputs[1][1]
    assert (checkout / "log").read_text().split() == ["venv", "pip", "pip"]


def test_an_installation_that_did_not_finish_starts_afresh(checkout: Path):
    assert set_up(checkout).wait(30) == 0
    (checkout / ".venv" / "installing").touch()
    again = set_up(checkout)
    assert "did not finish; starting afresh" in again.communicate(timeout=30)[1]
    assert (checkout / "log").read_text().split() == ["venv", "pip", "pip"] * 2


def test_another_torch_is_installed_where_one_is_named(checkout: Path):
    for wanted in ({}, {"TORCH": "torch==2.9.1+cu126"}):
        assert set_up(checkout, **wanted).wait(30) == 0
    packages = (checkout / "log.packages").read_text().split()
    assert packages[::2] == ["torch==2.13.0", "torch==2.9.1+cu126"]
