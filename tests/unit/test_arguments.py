"""Values of command lines that scripts share, and scripts that refuse senseless ones before they measure."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.arguments import new_file, number_from, positive

ROOT = Path(__file__).parents[2]


def test_what_is_read(tmp_path: Path) -> None:
    assert [number_from(0)("0"), number_from(1)("12")] == [0, 12]
    assert [positive("0.5"), positive("20")] == [0.5, 20]
    assert new_file(str(tmp_path / "new.json")) == tmp_path / "new.json"


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((number_from(1), text) for text in ("0", "-1", "1.5", "", "one", "+1", "\u0661")),
        *((positive, text) for text in ("0", "-1", "nan", "inf", "long")),
        *((new_file, text) for text in ("no/such/folder/file", ".")),
    ],
)
def test_what_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be .*, got {re.escape(repr(text))}"):
        read(text)


@pytest.mark.parametrize(
    "command",
    [
        "eval demo --limit 0",
    ],
)
def test_scripts_refuse_senseless_values(command: str) -> None:
    name, *arguments = command.split()
    run = subprocess.run(
        [sys.executable, "-m", f"scripts.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert f"argument {arguments[-2]}: must be a" in run.stderr
