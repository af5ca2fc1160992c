"""A sample of a benchmark, and a plan of one, for tests."""

from __future__ import annotations

from scripts.eval.sampler import Plan
from scripts.eval.samples import Sample, Setting
from scripts.eval.task_kinds import TASKS

SAMPLE = Sample(
    setting="a", run=0, index=0, task="problems", text="#### 2", visible_tokens=30, opened_tokens=64, num_forwards=7,
    model_tokens=300, seconds=3.0, first_seconds=1.0, forward_seconds=2.4, host_seconds=None, pages=2,
    graph_tokens=None, padded_tokens=None, eager_steps=None, filled=(20, 10),
    scores={"exact": 1.0, "loose": 0.0}, metric="exact",
)  # fmt: skip


def plan(settings: list[Setting], runs: int = 2, count: int = 2) -> Plan:
    """A plan of ``runs`` answers to each of ``count`` equal problems in each setting."""
    problem = (TASKS["problems"], {"question": "1 + 1?", "answer": "#### 2"})
    return Plan(settings=settings, problems=[problem] * count, examples={}, runs=runs, warmup=0)
