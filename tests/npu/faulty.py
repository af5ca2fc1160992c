"""One rank of test_faults.py: python -m tests.npu.lab --numeric tests.npu.faulty FAULT JOB, with torchrun's variables.
It starts the engines of a JOB of ``tests.dist.generate`` on dies with a fault."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lopa_ascend.backend.npu import Npu
from tests.dist.generate import run
from tests.npu.lab import attention, capture, collectives, device, engine  # noqa: F401


def wrong_sums() -> None:
    """Of all ranks alike, in one value."""
    all_reduce: Callable[..., Any] = dist.all_reduce

    def wrong(x: Tensor, *args: Any, **options: Any) -> None:
        all_reduce(x, *args, **options)
        if x.is_floating_point():
            x.view(-1)[-1:] += 1

    mock.patch.object(dist, "all_reduce", wrong).start()


def wrong_captured_sums() -> None:
    run_task = capture.Task.run

    def wrong(self: capture.Task) -> None:
        run_task(self)
        if self.op.name() == "lab::all_reduce_":
            self.results[0].tensor().view(-1)[-1:] += 1

    mock.patch.object(capture.Task, "run", wrong).start()


def one_bad_die() -> None:
    """That of rank 1 gives averages in TND."""
    spans, attend, layouts = attention.query_spans, attention.attend, [""]

    def noted(query: Tensor, lengths: Any, layout: str, heads: int) -> list[Tensor]:
        layouts[0] = layout
        return spans(query, lengths, layout, heads)

    def averaged(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
        return attend(query, key, value, 0.0 if layouts[0] == "TND" else scale, seen)

    if os.environ["RANK"] == "1":
        mock.patch.object(attention, "query_spans", noted).start()
        mock.patch.object(attention, "attend", averaged).start()


FAULTS = {"sums": wrong_sums, "captured sums": wrong_captured_sums, "one bad die": one_bad_die}


def main() -> None:
    FAULTS[sys.argv[1]]()
    with mock.patch.object(Npu, "collectives", "gloo"):
        for job in json.loads(Path(sys.argv[2]).read_text()):
            run(job)


if __name__ == "__main__":
    main()
