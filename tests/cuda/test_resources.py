"""Every kernel of a step, compiled by Triton's own compiler for three generations of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import triton

SPILLED = {80: 64, 90: 0, 100: 0}
"""Bytes of local memory that a thread of a kernel may have, by generation; there registers are spilled to."""
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory of a block, by the CUDA programming guide."""
PRODUCTS = ("attend_tile", "multiply_int8")
HAS_INT8_TCGEN05 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
"""Otherwise int8 products run on a Blackwell chip by the instructions of Ampere."""


def test_kernels_compile_and_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as open_cuda has it
    command = [sys.executable, "-m", "tests.cuda.resources"]
    reports = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len({report["kernel"] for report in reports}) == 8
    for report in reports:
        kind = report["architecture"]
        print(*(f"{name} {value}" for name, value in report.items() if name != "options"), sep=", ")
        assert report["stack"] <= SPILLED[kind], report
        assert report["shared"] <= SHARED[kind], report
        if report["kernel"] in PRODUCTS:  # on the matrix units of that generation
            has_tcgen05 = kind == 100 and (report["kernel"] != "multiply_int8" or HAS_INT8_TCGEN05)
            assert (report["wgmma"], report["tcgen05"]) == (kind == 90, has_tcgen05), report
