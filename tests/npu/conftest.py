"""Only the environment that ci/npu.sh makes has torch_npu on stand-ins for CANN; elsewhere the modules here are
skipped, one by one and without being imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

AVAILABLE = (Path(sys.prefix) / "cann").is_dir()

if AVAILABLE:
    import tests.npu.lab  # noqa: F401  before anything imports torch_npu, which needs what it loads


class Skipped(pytest.File):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs the environment of ci/npu.sh")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return None if AVAILABLE else Skipped.from_parent(parent, path=module_path)
