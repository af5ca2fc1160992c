"""What replays cost the host, by what becomes of the KV lengths: kept, changed, or changed by a thread.

    python -m scripts.selftest.updates    prints the times of this process's TASK_QUEUE_ENABLE as JSON

torch_npu reads TASK_QUEUE_ENABLE once, so the self-test starts another process for another value.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch

from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.environment import TASK_QUEUE, number
from lopa_ascend.config import ATTENTION_LAYOUTS
from scripts.selftest.speed import RANK_HEADS, replayed_attention
from tests.kernel_cases import BLOCK
from tests.npu.captures import capture_lengths
from tests.npu.cases import attention_sample

MODULE = "scripts.selftest.updates"
CALLS = 28
"""Calls of attention in the graph: those of Dream-7B's layers."""
KEPT, CHANGED, IN_THREAD = "kept", "changed", "changed by a thread"
LENGTHS = (40, 41)
QUEUES = ("0", "1")
MAX_SECONDS = 600
"""Of the other process, which loads torch_npu and its kernels."""
FASTER = 0.95


def own_queue() -> str:
    """The value of TASK_QUEUE_ENABLE that this process has; torch_npu's default is 1."""
    return str(number(os.environ.get(TASK_QUEUE, "1")))


def update_times(ops: Ops, repeats: int) -> dict[str, float]:
    """Median microseconds in which the host launches a replay of CALLS attention calls, by what the lengths do."""
    npu = torch.get_device_module("npu")
    there = attention_sample([BLOCK], capture_lengths(1), 2, RANK_HEADS).on(ops)
    replay = replayed_attention(ops, there, "updates", CALLS)
    times = {}
    for name in (KEPT, CHANGED, IN_THREAD):
        replay.in_thread, durations = name == IN_THREAD, []
        for index in range(2 + repeats):
            lengths = [LENGTHS[0 if name == KEPT else index % 2]] * len(there.entries.lengths)
            npu.synchronize()
            begin = time.perf_counter()
            replay(lengths)
            durations.append(time.perf_counter() - begin)
        npu.synchronize()
        times[name] = 1e6 * statistics.median(durations[2:])
    return times


def times_by_queue(ops: Ops, repeats: int) -> dict[str, dict[str, float] | str]:
    """``update_times`` by the value of TASK_QUEUE_ENABLE; a text where they could not be measured."""
    found: dict[str, dict[str, float] | str] = {}
    for queue in QUEUES:
        found[queue] = update_times(ops, repeats) if queue == own_queue() else _in_other_process(queue, repeats)
    return found


def _in_other_process(queue: str, repeats: int) -> dict[str, float] | str:
    """The times with another value, by a process that is started as this one was."""
    words = sys.orig_argv
    if "scripts.selftest" not in words:
        return "not measured: this process does not know how it was started"
    command = [sys.executable, *words[1 : words.index("scripts.selftest")], MODULE, str(repeats)]
    try:
        done = subprocess.run(
            command, env={**os.environ, TASK_QUEUE: queue}, capture_output=True, text=True, timeout=MAX_SECONDS
        )
        times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return f"not measured: {type(error).__name__}"
    return times


def fastest_queue(times: dict[str, dict[str, float] | str]) -> str | None:
    """The value of TASK_QUEUE_ENABLE other than 1 with which changed lengths clearly cost less; None to leave it."""
    best = {queue: min(found[CHANGED], found[IN_THREAD]) for queue, found in times.items() if isinstance(found, dict)}
    return "0" if len(best) == len(QUEUES) and best["0"] < FASTER * best["1"] else None


def main() -> None:
    from scripts.selftest.findings import eager_ops

    print(json.dumps(update_times(eager_ops(ATTENTION_LAYOUTS[0]), int(sys.argv[1]))))


if __name__ == "__main__":
    main()
