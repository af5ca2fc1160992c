"""One rank of test_parallel_engine.py: python -m tests.npu.lab --numeric tests.npu.generate JOB OUT, with torchrun's
variables. JOB and OUT are those of ``tests.dist.generate``.

The engine runs on the simulated device with captured graphs. gloo takes the place of HCCL.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest import mock

from lopa_ascend.backend.npu import Npu
from tests.dist.generate import run
from tests.npu.lab import capture, collectives, device, engine  # noqa: F401

WRITE = "npu::npu_scatter_pa_kv_cache"
"""A task that every step has, and the check at start has not."""


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with mock.patch.object(Npu, "collectives", "gloo"):
        outputs = [run(job) for job in jobs]
    named = [([task.op.name() for task in tape.tasks], tape) for tape in capture.tapes()]
    steps = [(names, tape) for names, tape in named if WRITE in names]
    found = {
        "outputs": outputs,
        "tasks": [names for names, _ in steps],
        "replays": [tape.replays for _, tape in steps],
        "stream_waits": [tape.stream_waits for _, tape in steps],
        "on_aicpu": [tape.on_aicpu for _, tape in steps],
    }
    Path(f"{sys.argv[2]}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
