"""A laboratory that runs the real torch_npu and torchair without an NPU and without CANN.

Importing this package loads stand-ins for the CANN libraries, which ``standins.py`` has built into the environment, and
then torch_npu and torchair.

- ``kernels`` and ``attention``: the ``npu::`` ops on CPU tensors, with the constraints that their documents state.
- ``constraints``: how a broken constraint fails, and which constraints numeric mode lifts.
- ``device``: a simulated NPU, whose tensors compute by these kernels.
- ``capture``: ACL graphs on the simulated device.
- ``limits``: what no ACL graph can hold.
- ``units``: which unit of a die computes an op, or runs a collective.
- ``engine``: GE graphs on the simulated device.
- ``collectives``: collectives between ranks, through gloo.
- ``traffic``: what was launched, and where the host waited for the device.
- ``lowering``: the GE graph that torchair makes of a function, counted by op.

The laboratory cannot show whether a kernel takes a shape on a real device, GE's own fusion, HCCL, and time.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

STANDINS = Path(sys.prefix) / "cann"
PR_SET_TIMERSLACK = 29
"""Of Linux's prctl: by how many nanoseconds the waits of this thread, and of threads that it starts, may be longer."""
TIMER_SLACK = 5_000_000
"""A thread of torch_npu looks ten thousand times a second for work and would take a fifth of a core. So 200 times."""


def _load() -> ctypes.CDLL:
    # The loader knows libraries by their sonames, so whatever needs one of these later finds it loaded.
    names = (STANDINS / "sonames.txt").read_text(encoding="utf-8").split()
    return [ctypes.CDLL(str(STANDINS / name), mode=ctypes.RTLD_GLOBAL) for name in names][0]


cann = _load()
ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK))

import torch_npu  # noqa: E402, F401
import torchair  # noqa: E402, F401
