"""What the host launched on the simulated device, and where it waited for the device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.npu.lab import cann

WAITS = ("aclrtSynchronizeStream", "aclrtSynchronizeDevice", "aclrtSynchronizeEvent", "aclrtMemcpy")
"""Functions of the runtime that wait for the device, in the order of their counters in acl.c."""


@dataclass
class Traffic:
    """What happened in one ``host_traffic`` context."""

    launches: list[str] = field(default_factory=list)
    """Names of kernels, graph replays and copies, in order."""
    stalls: list[str] = field(default_factory=list)
    """Names of everything that made the host wait until the device was done, such as reading a value. Calls of the
    runtime, as ``wait NAME``, are added at the end."""
    updates: int = 0
    """Tasks of captured graphs that were given other arguments."""


_open: list[Traffic] = []


def launched(name: str) -> None:
    """Notes a launch in every open context."""
    for traffic in _open:
        traffic.launches.append(name)


def stalled(name: str) -> None:
    """Notes a wait of the host in every open context."""
    for traffic in _open:
        traffic.stalls.append(name)


def updated() -> None:
    """Counts an update of a task in every open context."""
    for traffic in _open:
        traffic.updates += 1


@contextmanager
def one_launch(name: str) -> Iterator[None]:
    """Everything that is launched in this context counts as one launch."""
    before = [len(traffic.launches) for traffic in _open]
    yield
    for traffic, count in zip(_open, before, strict=True):
        traffic.launches[count:] = [name]


@contextmanager
def host_traffic() -> Iterator[Traffic]:
    """Records the traffic of all threads in this context."""
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
