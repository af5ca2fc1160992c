"""Ranks with unequal memory agree on the smallest number of pages; rows that are left empty are counted exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import forks
from tests.dist.memory import LESS, NUM_LOOKAHEADS, NUM_PAGES
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank


def test_pages_and_idle_rows(tmp_path: Path) -> None:
    model = write_dream(tmp_path / "model")
    forks.run(2, "tests.dist.memory", [str(model), str(tmp_path / "out")], tmp_path)
    for rank in range(2):
        seen = json.loads((tmp_path / f"out.{rank}").read_text())
        assert seen["pages"] == 3 * [NUM_PAGES - LESS]
        assert set(seen["rows"]) >= {1, 1 + NUM_LOOKAHEADS}
        assert seen["num_rows"] == sum(seen["rows"])
        assert seen["idle_rows"] == sum(rows % 2 for rows in seen["rows"])
