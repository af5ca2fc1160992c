"""Runs a module on the simulated device: python -m tests.npu.lab [--numeric] MODULE [ARGUMENT ...]

For example the self-test, scripts.selftest; or the bundled model, which has small heads and so needs numeric mode:
--numeric scripts.eval demo --device npu --dtype bfloat16 --limit 100
"""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext

from tests.npu.lab import capture, device  # noqa: F401
from tests.npu.lab.constraints import numeric


def main() -> None:
    lifted = sys.argv[1:2] == ["--numeric"]
    sys.argv = sys.argv[1 + lifted :]
    if not sys.argv:
        sys.exit(__doc__)
    with numeric() if lifted else nullcontext():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
