"""What the host launched on the simulated device, and where it stopped for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.npu.lab import cann

# In the order of acl.c.
WAITS = ("aclrtSynchronizeStream", "aclrtSynchronizeDevice", "aclrtSynchronizeEvent", "aclrtMemcpy")


@dataclass
class Traffic:
    """``launches``: kernels, replays of graphs and copies, by name and in order. ``stalls``: everything that made the
    host wait until the device was done, such as reading a value; ``wait NAME`` are calls of the runtime, which are
    added at the end."""

    launches: list[str] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)


_open: list[Traffic] = []


def launched(name: str) -> None:
    for traffic in _open:
        traffic.launches.append(name)


def stalled(name: str) -> None:
    for traffic in _open:
        traffic.stalls.append(name)


@contextmanager
def one_launch(name: str) -> Iterator[None]:
    """What is launched in this block counts as one."""
    before = [len(traffic.launches) for traffic in _open]
    yield
    for traffic, count in zip(_open, before, strict=True):
        traffic.launches[count:] = [name]


@contextmanager
def host_traffic() -> Iterator[Traffic]:
    """Records the traffic of the block, of every thread."""
    counts = (ctypes.c_ulong * len(WAITS)).in_dll(cann, "standin_waits")
    before = list(counts)
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)
        for name, first, last in zip(WAITS, before, counts, strict=True):
            traffic.stalls += [f"wait {name}"] * (last - first)
