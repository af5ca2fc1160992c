"""Ops in C++ for what torch computes slowly on a CPU, on x86 processors with bfloat16 units (AVX512-BF16).

Installing the project compiles them where there is a C++ compiler (``setup.py``). Without one, or on another processor,
``CpuOps`` computes everything by torch; results then differ in the last bits.
"""

from __future__ import annotations

import torch

from lopa_ascend.backend.cpu.native.kernels import find_kernels
from lopa_ascend.backend.cpu.native.ops import NativeOps
from lopa_ascend.backend.cpu.ops import CpuOps


def load_cpu_ops(*, packs_weights: bool = False) -> CpuOps:
    """The fastest ops that this processor and this installation have."""
    kernels = find_kernels()
    if kernels is None:
        return CpuOps(packs_weights=packs_weights)
    # With AMX torch multiplies many queries up to five times as fast.
    has_amx = torch.cpu._is_amx_tile_supported()
    return NativeOps(kernels, packs_weights=packs_weights, has_attention=not has_amx)


__all__ = ["NativeOps", "find_kernels", "load_cpu_ops"]
