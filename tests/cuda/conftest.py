"""Only ci/cuda.sh, in its environment, lets Triton interpret the kernels, on tensors of the CPU; elsewhere the modules
here are skipped, one by one and without being imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

AVAILABLE = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"

if AVAILABLE:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def wide_dot(
        builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle, *options: object
    ) -> TensorHandle:
        """Sums in float64, rounded once. A GPU gives a row of a tile the same bits wherever it lies, as NumPy's product
        in float32 does on Intel's processors with AVX-512 alone."""
        if c.data.dtype != np.float32:
            return dot(builder, a, b, c, *options)
        sums = dot(builder, a, b, TensorHandle(c.data.astype(np.float64), tl.float64), *options)
        return TensorHandle(sums.data.astype(np.float32), c.dtype)

    InterpreterBuilder.create_dot = wide_dot


class Skipped(pytest.File):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs the environment of ci/cuda.sh")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return None if AVAILABLE else Skipped.from_parent(parent, path=module_path)
