"""The page docs/add-a-model.md says what the examples say."""

from __future__ import annotations

import re
from pathlib import Path

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.graph.fusion.passes import passes

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [ROOT / "examples" / name for name in ("kestrel", "plain_dream")]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text("utf-8")


def test_its_code_is_that_of_the_examples() -> None:
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
    found = {
        "python": "".join((path / f"{path.name}.py").read_text("utf-8") for path in EXAMPLES),
        "toml": "".join((path / "pyproject.toml").read_text("utf-8") for path in EXAMPLES),
    }
    shown = [(kind, text) for kind, text in blocks if kind in found and "register_model" not in text]
    assert [kind for kind, _ in shown] == ["python", "python", "toml", "python", "python", "toml"]
    for kind, text in shown:
        assert text in found[kind]


def test_it_names_every_pass() -> None:
    named = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")))
    assert sorted(named) == sorted(passes(CpuOps()))
