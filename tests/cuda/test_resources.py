"""Every kernel of a step, compiled by Triton's own compiler for six kinds of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import triton

from tests.cuda.resources import PRODUCTS

SPILLED = {80: 160, 86: 160, 89: 160, 90: 0, 100: 32, 120: 160}
"""Bytes of local memory that a thread of a kernel may have, by kind of GPU; there registers are spilled to."""
SPILLED_OF_FLOAT32 = 1024
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory of a block, by the CUDA programming guide."""
HAS_INT8_TCGEN05 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Otherwise int8 products run on a Blackwell chip by the instructions of Ampere."""


def test_kernels_compile_and_fit() -> None:
    """Rows are loaded and stored 4 bytes or more at a time: 2 at a time they would take most of a kernel's time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as open_cuda has it
    command = [sys.executable, "-m", "tests.cuda.resources"]
    reports = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len({report["kernel"] for report in reports}) == 13
    for report in reports:
        kind, dtype = report["architecture"], report["dtype"]
        print(*(f"{name} {value}" for name, value in report.items() if name != "options"), sep=", ")
        assert report["stack"] <= (SPILLED[kind] if dtype == "bf16" else SPILLED_OF_FLOAT32), report
        assert report["shared"] <= SHARED[kind], report
        if report["kernel"] in PRODUCTS and dtype == "bf16":  # on the matrix units of that generation
            has_tcgen05 = kind == 100 and (report["kernel"] != "multiply_int8" or HAS_INT8_TCGEN05)
            assert (report["wgmma"], report["tcgen05"]) == (kind == 90, has_tcgen05), report
        if report["kernel"] == "multiply_experts":
            assert report["wgmma"] == (kind == 90), report
        if report["kernel"] != "multiply_int8":
            assert not report["narrow"], report
