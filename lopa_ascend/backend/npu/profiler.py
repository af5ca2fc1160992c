"""Profiles of steps on an NPU, by torch_npu's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_npu import npu, profiler

from lopa_ascend.backend.interface import RunningProfile


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Shows what it encloses as a range of the host in profiles."""
    marked = npu.mstx.range_start(name)
    try:
        yield
    finally:
        npu.mstx.range_end(marked)


def start_profile(folder: Path, worker: str, delay: int, steps: int) -> RunningProfile:
    """See ``interface.Profiler``. Writes CANN's raw data, because their analysis takes minutes."""
    options = profiler._ExperimentalConfig(
        profiler_level=profiler.ProfilerLevel.Level1,
        aic_metrics=profiler.AiCMetrics.PipeUtilization,
        mstx=True,
    )
    profile: RunningProfile = profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        schedule=profiler.schedule(wait=delay, warmup=1, active=steps, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker, analyse_flag=False),
        experimental_config=options,
    )
    profile.start()
    return profile
