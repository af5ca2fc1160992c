"""The single-phase KV update: committed pages are equal on all branch-parallel ranks without any traffic for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist import ranks
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank


def run(folder: Path, tp: int, bp: int, window: str, left_out: str = "") -> dict[str, int]:
    model = write_dream(folder / "model", hidden=64, intermediate=96)
    sizes = {"tensor_parallel_size": tp, "branch_parallel_size": bp, "agreement_interval": 0}
    job = folder / "job.json"
    job.write_text(json.dumps({"model": str(model), "sizes": sizes, "window": window, "left_out": left_out}))
    ranks.finish(ranks.start(tp * bp, "-m", "tests.dist.pages", str(job), str(folder / "out")))
    reports = [json.loads((folder / f"out.{rank}").read_text()) for rank in range(tp * bp)]
    assert all(report == reports[0] for report in reports[1:])
    report: dict[str, int] = reports[0]
    assert report["committing"] > 10
    return report


@pytest.mark.parametrize(("tp", "bp"), [(1, 2), (1, 4), (2, 2)])
def test_committed_pages_are_equal_everywhere_without_traffic(tp: int, bp: int, tmp_path: Path) -> None:
    report = run(tmp_path, tp, bp, "block_causal")
    assert report["differing"] == 0
    assert report["kv_bytes"] == 0


def test_full_attention_agrees_by_its_second_phase(tmp_path: Path) -> None:
    report = run(tmp_path, 1, 2, "full")
    assert report["differing"] == 0
    assert report["kv_bytes"] > 0


@pytest.mark.parametrize(
    ("window", "rule"),
    [
        ("block_causal", "idle slots"),
        ("block_causal", "repeats"),
        ("full", "repeats"),
        ("full", "sending"),
        ("full", "copies"),
    ],
)
def test_every_write_rule_is_needed(window: str, rule: str, tmp_path: Path) -> None:
    assert run(tmp_path, 1, 2, window, left_out=rule)["differing"] > 0
