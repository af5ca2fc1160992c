"""Only ci/cuda.sh, in its environment, lets Triton interpret the kernels, on tensors of the CPU; elsewhere the modules
here are skipped, one by one and without being imported."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

AVAILABLE = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


class Skipped(pytest.File):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs the environment of ci/cuda.sh")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return None if AVAILABLE else Skipped.from_parent(parent, path=module_path)
