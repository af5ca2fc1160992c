"""What tests of ranks rest on: a rank that fails is noticed, with what it said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import forks

pytestmark = pytest.mark.multirank


def test_a_rank_that_fails_fails_the_test(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    with pytest.raises(AssertionError, match=r"\[1, 1\]\n(.|\n)*FileNotFoundError.*missing\.json"):
        forks.run(2, "tests.dist.generate", [str(missing), str(tmp_path / "out")], tmp_path)
