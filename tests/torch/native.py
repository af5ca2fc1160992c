"""The ops in C++, for tests."""

from __future__ import annotations

import pytest

from lopa_ascend.backend.cpu.native import NativeOps, find_kernels


def native_ops() -> NativeOps:
    """The ops of this processor; skips the test where there are none."""
    kernels = find_kernels()
    if kernels is None:
        pytest.skip("the kernels in C++ were not compiled, or this processor has no AVX512-BF16")
    return NativeOps(kernels)
