"""A laboratory for torch_npu and torchair without an NPU and without CANN.

Importing this package loads the stand-ins for the CANN libraries that ``standins.py`` has built into the environment,
and after them torch_npu and torchair, both the real ones.

``lowering``: the graph that torchair makes of a function, counted by op. ``kernels`` and ``attention``: what the
``npu::`` ops compute, on CPU tensors, with the constraints that their documents state (``constraints``). ``device``:
tensors on ``npu`` that compute, by these kernels. ``capture``: ACL graphs of them. ``engine``: GE graphs of them.
``collectives``: between ranks, through gloo. ``traffic``: what was launched, and where the host stopped for the device.

What it cannot show: whether a kernel takes a shape on the device, GE's own fusion, HCCL, and time.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

STANDINS = Path(sys.prefix) / "cann"


def _load() -> ctypes.CDLL:
    # By soname: whatever needs one of them later finds it loaded.
    names = (STANDINS / "sonames.txt").read_text(encoding="utf-8").split()
    return [ctypes.CDLL(str(STANDINS / name), mode=ctypes.RTLD_GLOBAL) for name in names][0]


cann = _load()

import torch_npu  # noqa: E402, F401
import torchair  # noqa: E402, F401
