"""Chooses what the bundled model practises more: what it still gets wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable

from scripts.demo_problems import Problem

MEMORY = 0.6
"""How much of a template's rate of failures stays with each new outcome."""
UNKNOWN = 0.7
"""Rate of failures of a template that was not met yet: high, so that new templates are met soon."""


class Focus:
    """How often the model fails at the problems of each template, and which problems to keep for that.

    Args:
        least_share: share of the problems that are kept of a template that the model always solves; 1 keeps all.
    """

    def __init__(self, least_share: float) -> None:
        self.least_share = least_share
        self.failures: dict[str, float] = {}
        """Rate of failures, by source."""

    def keeps(self, rng: random.Random, source: str) -> bool:
        """Whether a problem of this source goes into a batch; the more often the model fails, the likelier."""
        return rng.random() < self.least_share + (1 - self.least_share) * self.failures.get(source, UNKNOWN)

    def record(self, sources: Iterable[str], solved: Iterable[bool]) -> None:
        """Takes note of what came of the problems of a batch."""
        for source, is_solved in zip(sources, solved, strict=True):
            before = self.failures.get(source, UNKNOWN)
            self.failures[source] = MEMORY * before + (1 - MEMORY) * (not is_solved)


def source_of(problem: Problem) -> str:
    """What a problem was made from: its template, or its kind where it is put together."""
    return problem.template or problem.kind
