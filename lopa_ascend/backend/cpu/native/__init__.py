"""Ops in C++ for what torch computes slowly on x86 processors: linear layers in bfloat16 and of int8 activations from
AVX2 on, the other ops with bfloat16 units (AVX512-BF16).

Installing the project compiles them if there is a C++ compiler (``setup.py``). Without one, or on another processor,
``CpuOps`` computes everything by torch; results then differ in the last bits.
"""

from __future__ import annotations

from functools import partial

import torch

from lopa_ascend.backend.cpu.native.integers import IntegerOps
from lopa_ascend.backend.cpu.native.kernels import find_kernels
from lopa_ascend.backend.cpu.native.ops import NativeOps, multiply_blocks
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.cpu.processor import bfloat16_instructions


def load_cpu_ops(*, packs_weights: bool = False) -> CpuOps:
    kernels = find_kernels()
    if kernels is None:
        return CpuOps(packs_weights=packs_weights)
    instructions = bfloat16_instructions()
    multiply = None if instructions is None else partial(multiply_blocks, kernels, instructions)
    if not torch.cpu._is_avx512_bf16_supported():
        return IntegerOps(kernels, packs_weights=packs_weights, multiply_blocks=multiply)
    # With AMX torch attends with many queries up to five times as fast.
    has_amx = torch.cpu._is_amx_tile_supported()
    return NativeOps(kernels, packs_weights=packs_weights, multiply_blocks=multiply, has_attention=not has_amx)


__all__ = ["IntegerOps", "NativeOps", "find_kernels", "load_cpu_ops"]
