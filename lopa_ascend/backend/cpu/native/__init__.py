"""Ops in C++ for what torch computes slowly on a CPU, on x86 processors with bfloat16 units (AVX512-BF16).

Installing the project compiles them where there is a C++ compiler (``setup.py``). Without one, or on another processor,
``CpuOps`` computes everything by torch; results then differ in the last bits.
"""

from __future__ import annotations

from lopa_ascend.backend.cpu.native.kernels import find_kernels
from lopa_ascend.backend.cpu.native.ops import NativeOps
from lopa_ascend.backend.cpu.ops import CpuOps


def load_cpu_ops(*, packs_weights: bool = False) -> CpuOps:
    """The fastest ops that this processor and this installation have."""
    kernels = find_kernels()
    return CpuOps(packs_weights=packs_weights) if kernels is None else NativeOps(kernels, packs_weights=packs_weights)


__all__ = ["NativeOps", "find_kernels", "load_cpu_ops"]
