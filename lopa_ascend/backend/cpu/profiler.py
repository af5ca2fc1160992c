"""Profiles of steps on a CPU, by torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torch import profiler

from lopa_ascend.backend.interface import RunningProfile


def mark(name: str) -> AbstractContextManager[object]:
    """Shows what it encloses as a range in profiles."""
    return profiler.record_function(name)


def start_profile(folder: Path, worker: str, delay: int, steps: int) -> RunningProfile:
    """See ``interface.Profiler``."""
    profile = profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        schedule=profiler.schedule(wait=delay, warmup=1, active=steps, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker),
    )
    profile.start()
    return profile
