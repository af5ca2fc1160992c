"""Profiles of steps by torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import profiler

from lopa_ascend.backend.interface import RunningProfile


def mark(name: str) -> AbstractContextManager[object]:
    """Shows what it encloses as a range in profiles."""
    return profiler.record_function(name)


@dataclass(frozen=True)
class TorchProfiler:
    """An ``interface.Profiler``."""

    activities: tuple[profiler.ProfilerActivity, ...] = ()
    """What is recorded beside the CPU."""
    mark = staticmethod(mark)

    def start_profile(self, folder: Path, worker: str, delay: int, steps: int) -> RunningProfile:
        profile = profiler.profile(
            activities=[profiler.ProfilerActivity.CPU, *self.activities],
            schedule=profiler.schedule(wait=delay, warmup=1, active=steps, repeat=1),
            on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker),
        )
        profile.start()
        return profile
