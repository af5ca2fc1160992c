"""The single-phase KV update: committed pages are equal on all branch-parallel ranks without any traffic for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import forks
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank


def run(folder: Path, tp: int, bp: int, window: str, *left_out: str) -> dict[str, dict[str, int]]:
    """What was seen without each of the write rules; "" leaves out none."""
    model = write_dream(folder / "model", hidden=64, intermediate=96)
    sizes = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    job = folder / "job.json"
    job.write_text(json.dumps({"model": str(model), "sizes": sizes, "window": window, "left_out": left_out}))
    forks.run(tp * bp, "tests.dist.pages", [str(job), str(folder / "out")], folder)
    seen = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(tp * bp)]
    assert all(reports == seen[0] for reports in seen[1:])
    reports: dict[str, dict[str, int]] = seen[0]
    assert all(report["committing"] > 10 for report in reports.values())
    return reports


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 4), (2, 2)], [(2, 2)]))
def test_committed_pages_are_equal_everywhere_without_traffic(tp: int, bp: int, tmp_path: Path) -> None:
    report = run(tmp_path, tp, bp, "block_causal", "")[""]
    assert report["differing"] == 0
    assert report["kv_bytes"] == 0


def test_every_write_rule_of_the_single_phase_is_needed(tmp_path: Path) -> None:
    whole, *others = run(tmp_path, 1, 2, "block_causal", "", "idle slots", "repeats").values()
    assert (whole["differing"], whole["kv_bytes"]) == (0, 0)
    assert all(report["differing"] for report in others)


def test_full_attention_agrees_by_its_second_phase_alone(tmp_path: Path) -> None:
    whole, *others = run(tmp_path, 1, 2, "full", "", "repeats", "sending", "copies").values()
    assert whole["differing"] == 0
    assert whole["kv_bytes"] > 0
    assert all(report["differing"] for report in others)
