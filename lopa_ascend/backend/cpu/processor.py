"""Which number formats this processor multiplies fast."""

from __future__ import annotations

import platform

import torch

IS_X86 = platform.machine() in ("x86_64", "AMD64")


def emulated_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that this processor cannot multiply; torch's own GEMM in them runs at a fifth of the speed of float32."""
    has_bfloat16 = not IS_X86 or torch.cpu._is_avx512_bf16_supported()
    return frozenset({torch.float16} if has_bfloat16 else {torch.float16, torch.bfloat16})


def packed_dtypes() -> frozenset[torch.dtype]:
    """Dtypes in which products with packed weights are faster on this processor."""
    has_bfloat16 = IS_X86 and torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    return frozenset({torch.bfloat16} if has_bfloat16 else ())


def has_int8_instructions() -> bool:
    """Whether this processor sums int8 products without saturating in between: VNNI, and AMX which comes with it."""
    return IS_X86 and torch.cpu._is_vnni_supported()
