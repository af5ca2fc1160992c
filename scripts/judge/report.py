"""What the judges share: their options and their verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much each judge asks; ``out`` takes the servers' logs and what the tools write."""

    out: Path
    url: str | None = None
    examples: int = 100
    problems: int = 100
    requests: int = 500
    clients: int = 64
    hostile: int = 10_000
    good: int = 200
    minutes: float = 20.0
    seed: int = 1


@dataclass
class Report:
    """Prints each verdict as it falls, and remembers what failed."""

    failed: list[str] = field(default_factory=list)

    def check(self, what: str, passed: bool, found: object) -> None:
        print(f"  {'ok    ' if passed else 'FAILED'}  {what}: {found}", flush=True)
        if not passed:
            self.failed.append(what)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
