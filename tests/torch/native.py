"""The ops in C++, for tests: on every processor, where there is a compiler."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import lopa_ascend.backend.cpu.native as package
from lopa_ascend.backend.cpu.native import NativeOps, find_kernels
from lopa_ascend.backend.cpu.native.integers import INSTRUCTIONS, IntegerOps
from lopa_ascend.backend.cpu.native.kernels import Kernels, load_kernels
from lopa_ascend.backend.cpu.native.ops import multiply_blocks
from lopa_ascend.backend.cpu.processor import Bfloat16Instructions, bfloat16_instructions, int8_instructions
from lopa_ascend.backend.cpu.products import Multiply

EMULATED = Path(__file__).parent / "emulated"
"""The folder with the instructions of AVX512-BF16 in plain C++."""


def native_ops() -> NativeOps:
    """The ops of this processor, or their kernels over emulated instructions; skips the test where neither works."""
    return NativeOps(_kernels(has_instructions=torch.cpu._is_avx512_bf16_supported()))


def bfloat16_layers(instructions: Bfloat16Instructions) -> Multiply:
    """Linear layers in bfloat16 by some instructions: of this processor, or emulated."""
    best = bfloat16_instructions()
    kernels = _kernels(has_instructions=best is not None and instructions <= best)
    return functools.partial(multiply_blocks, kernels, instructions)


def _kernels(*, has_instructions: bool) -> Kernels:
    """The kernels of this processor, or over emulated instructions; skips the test where neither works."""
    kernels = (find_kernels() if has_instructions else None) or emulated_kernels()
    if kernels is None:
        pytest.skip("this processor lacks the instructions, and there is no compiler to emulate them with")
    return kernels


def integer_ops(instructions: str) -> IntegerOps:
    """Linear layers of integers by some instructions of this processor, or by emulated ones that it lacks."""
    own = int8_instructions()
    has_them = own is not None and INSTRUCTIONS.index(instructions) <= INSTRUCTIONS.index(own)
    return IntegerOps(_kernels(has_instructions=has_them), packs_weights=True, instructions=instructions)


@functools.cache
def emulated_kernels() -> Kernels | None:
    """The kernels, compiled for any processor; None without a compiler, or if torch has no OpenMP library."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp())
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi"]
    options += [f"-D{attribute}=" for attribute in ("AVX2", "AVX512", "AMX", "AVX2_INT8", "VNNI", "AMX_INT8")]
    objects = []
    for source in sorted(Path(*package.__path__).glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([compiler, *options, f"-I{EMULATED}", "-c", source, "-o", objects[-1]], check=True)
    library = folder / "library.so"
    subprocess.run([compiler, "-shared", *objects, "-o", library], check=True)  # without an OpenMP library, as setup.py
    return load_kernels(str(library))
