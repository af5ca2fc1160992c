"""Ranks that decide something else, or never come to a decision."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist import forks, ranks

pytestmark = pytest.mark.multirank
DIFFERING = "tests.dist.differing"


@pytest.mark.parametrize(
    ("case", "sizes", "message"),
    [
        ("winner", {"tensor_parallel_size": 2}, r"rank 1 \(bp 0, tp 1\) .* step \d+.* what was decided"),
        ("seed", {"branch_parallel_size": 2}, r"rank 1 \(bp 1, tp 0\) .* step 0.* configuration"),
    ],
)
def test_rank_that_differs_is_named_by_all(case: str, sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    forks.run(2, DIFFERING, [case, json.dumps(sizes)], tmp_path)
    errors = [(tmp_path / f"stderr.{rank}").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert re.fullmatch(message, errors[0].rstrip())


def test_rank_stuck_in_its_own_work_is_given_up() -> None:
    """It goes on beating, for its other threads live."""
    leader, stuck = ranks.start(2, "-m", DIFFERING, "hang", '{"branch_parallel_size": 2}')
    try:
        stderr = leader.communicate(timeout=60)[1]
        assert stderr.startswith("the ranks' exchange of ")
    finally:
        stuck.kill()
        stuck.communicate()
