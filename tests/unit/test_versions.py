"""What pip installs, and on which versions the project was tried."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PYPROJECT: dict[str, Any] = TOML.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def names(extra: str) -> set[str]:
    """The packages of an extra, without their versions."""
    requirements = PYPROJECT["project"]["optional-dependencies"][extra]
    return {re.split(r"[\[<>=~!; ]", requirement)[0] for requirement in requirements}


def test_extras_have_what_their_commands_import():
    assert "httpx" in names("bench")
    assert {"httpx", "hypothesis"} <= names("judge")
    assert "httpx" in names("test")


def test_the_npu_extra_has_what_the_npu_tests_install():
    (line,) = re.findall(r"^packages=\((.*)\)$", (ROOT / "ci" / "npu.sh").read_text("utf-8"), re.MULTILINE)
    needed = names("npu") - {"torch_npu"}
    assert needed == {"protobuf", "decorator", "scipy", "attrs", "psutil"}
    assert needed <= set(line.split())
    page = (ROOT / "docs" / "ascend.md").read_text("utf-8")
    install = page[page.index("## Install") : page.index("## Switch")]
    assert needed <= set(re.findall(r"\w+", install))


def test_the_versions_that_are_run_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "nox", MagicMock())  # not among the test tools, and only the list is looked at
    monkeypatch.delitem(sys.modules, "ci.versions", raising=False)
    combinations = importlib.import_module("ci.versions").COMBINATIONS
    monkeypatch.delitem(sys.modules, "ci.versions")
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    (tried,) = re.findall(r"Tried on .*?\(`nox -f ci/versions.py`\): (.*?)\. ", page, re.DOTALL)
    for versions in combinations:
        assert all(version in tried for version in versions), versions


def test_the_clients_that_are_tried_are_those_of_the_page():
    programs = ROOT / "tests" / "judges" / "programs"
    pinned = dict(
        re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (programs / "requirements.txt").read_text(), re.MULTILINE)
    )
    pinned["ai"] = json.loads((programs / "package.json").read_text())["dependencies"]["ai"]
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    table = page[page.index("## Clients") : page.index("## Routes")]
    told = re.findall(r"^\| [^|]+ \| ([\d.]+(?:, [\d.]+)*) \|", table, re.MULTILINE)
    assert set(pinned.values()) < {version for cell in told for version in cell.split(", ")}
