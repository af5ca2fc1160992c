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

from lopa_ascend.parallel import mesh
from tests.dist.generate import run
from tests.npu.lab import capture, collectives, device, engine  # noqa: F401


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with mock.patch.object(mesh, "collective_backend", return_value="gloo"):
        outputs = [run(job) for job in jobs]
    tasks = [[task.op.name() for task in tape.tasks] for tape in capture.tapes()]
    replays = [tape.replays for tape in capture.tapes()]
    found = {"outputs": outputs, "tasks": tasks, "replays": replays}
    Path(f"{sys.argv[2]}.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
