"""The options and the verdicts of the judges."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the judges are asked to do."""

    out: Path
    """Directory of the servers' logs and of what the tools write."""
    url: str | None = None
    """A running server; None if each judge is to start one."""
    examples: int = 100
    """schema: examples for each endpoint."""
    problems: int = 100
    """accuracy: held-out problems."""
    requests: int = 500
    """load: requests."""
    clients: int = 64
    """load: concurrent clients."""
    hostile: int = 10_000
    """faults: hostile requests."""
    good: int = 200
    """faults: good requests beside them."""
    fuzz_seconds: float = 120.0
    """fuzz: duration."""
    minutes: float = 20.0
    """soak: duration."""
    runs: int = 200
    """replicas: faults."""
    seed: int = 1
    """Seed of everything that is random."""


@dataclass
class Report:
    """Prints verdicts, and keeps the failed ones."""

    failed: list[str] = field(default_factory=list)
    """What has failed, in order."""

    def check(self, what: str, passed: bool, found: object) -> None:
        """Prints a verdict.

        Args:
            what: what was checked.
            passed: whether the check has passed.
            found: what was found.
        """
        print(f"  {'ok    ' if passed else 'FAILED'}  {what}: {found}", flush=True)
        if not passed:
            self.failed.append(what)
