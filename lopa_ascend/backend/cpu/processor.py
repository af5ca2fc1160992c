"""Which number formats this processor multiplies fast."""

from __future__ import annotations

import os
import platform
from enum import IntEnum
from pathlib import Path

import torch

from lopa_ascend.backend.cpu.products import takes_packed

IS_X86 = platform.machine() in ("x86_64", "AMD64")
UNCAPPED = ("", "ALL", "DEFAULT")
CPU_INFO = Path("/proc/cpuinfo")


class Bfloat16Instructions(IntEnum):
    """Instructions of the kernel for linear layers (``native/bf16.cpp``, which has the same order)."""

    AVX2, AVX512, AVX512_BF16, AMX = range(4)


def bfloat16_instructions() -> Bfloat16Instructions | None:
    """The fastest ones that this processor has and the caps of torch and oneDNN allow."""
    capability = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY caps it
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    is_uncapped = cap in UNCAPPED
    if not IS_X86 or capability not in ("AVX2", "AVX512"):
        return None
    if capability == "AVX2" or not (is_uncapped or cap.startswith("AVX512")):
        return Bfloat16Instructions.AVX2
    if _has_amx():
        return Bfloat16Instructions.AMX
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() and cap not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    return Bfloat16Instructions.AVX512_BF16 if has_bfloat16 else Bfloat16Instructions.AVX512


def _has_amx() -> bool:
    """Whether this processor has AMX, the system grants its tiles, and oneDNN's cap allows it."""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    is_allowed = cap in UNCAPPED or "AMX" in cap
    return is_allowed and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def emulated_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that this processor cannot multiply; torch's own GEMM in them runs at a fifth of the speed of float32."""
    has_bfloat16 = not IS_X86 or torch.cpu._is_avx512_bf16_supported()
    return frozenset({torch.float16} if has_bfloat16 else {torch.float16, torch.bfloat16})


def packed_dtypes() -> frozenset[torch.dtype]:
    """Dtypes in which products with packed weights are faster on this processor. oneDNN multiplies packed weights, and
    MKL plain float32 ones. On an AMD EPYC with AVX-512 (Zen 5) MKL reached less than half of oneDNN's speed; on Intel's
    processors the two were not compared, and MKL is kept."""
    if not IS_X86 or not torch.backends.mkldnn.is_available():
        return frozenset()
    dtypes = set()
    if torch.cpu._is_avx512_supported() and not _may_be_from_intel():
        dtypes.add(torch.float32)
    if torch.cpu._is_avx512_bf16_supported():
        dtypes.add(torch.bfloat16)
    return frozenset(filter(takes_packed, dtypes))


def _may_be_from_intel() -> bool:
    return not CPU_INFO.exists() or "GenuineIntel" in CPU_INFO.read_text()


def has_int8_instructions() -> bool:
    """Whether this processor sums int8 products without saturating in between: VNNI, and AMX which comes with it."""
    return IS_X86 and torch.cpu._is_vnni_supported()


def int8_instructions() -> str | None:
    """The fastest instructions by which the kernels multiply int8 numbers: "amx", "vnni" or "avx2". torch's cap
    (ATEN_CPU_CAPABILITY) holds for them too, and oneDNN's (ONEDNN_MAX_CPU_ISA) for AMX."""
    capability = torch.backends.cpu.get_cpu_capability()
    if not IS_X86 or capability not in ("AVX2", "AVX512"):
        return None
    if capability == "AVX2" or not torch.cpu._is_vnni_supported():
        return "avx2"
    return "amx" if _has_amx() else "vnni"
