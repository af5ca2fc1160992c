"""What is timed on an NPU: attention by its layout, the host's part of a replay, the parts of a step, all-reduces.

    python -m scripts.selftest.times REPEATS    prints what replays take this process's host, as JSON

torch_npu reads TASK_QUEUE_ENABLE once, so the self-test starts another process for another value. Attention and the
parts of a step are timed in replayed graphs: the launch of an eager call takes the host longer than the device takes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.environment import TASK_QUEUE, number
from lopa_ascend.config import ATTENTION_LAYOUTS
from lopa_ascend.kv.pages import pages_for
from lopa_ascend.parallel.collectives import Group
from tests.kernel_cases import BLOCK, Case
from tests.npu.captures import Replayed, capture_lengths
from tests.npu.cases import CPU, HEADS, NUM_LAYERS, AttentionSample, S, attention_sample, randn
from tests.npu.exchanges import captured_group

TP = 4
"""Ranks that share the heads, and the products of a layer."""
FASTER = 0.95
"""The share of the usual choice's time that another one may take at most to be chosen instead."""


def median_micros(run: Callable[[], object], repeats: int, *, of_host: bool = False) -> float:
    """Median microseconds from a call until the device is done, or until the host goes on."""
    npu = torch.get_device_module("npu")
    durations = []
    for _ in range(repeats):
        npu.synchronize()
        start = time.perf_counter()
        run()
        if not of_host:
            npu.synchronize()
        durations.append(time.perf_counter() - start)
    return 1e6 * statistics.median(durations)


def sample_of_rank(blocks: int, num_keys: int) -> AttentionSample:
    """Attention of so many blocks with the heads of a rank of TP 4. It has twice the pages, since the layout with
    shorter entries counts each of them twice."""
    heads = HEADS[0] // TP, HEADS[1] // TP
    return attention_sample([BLOCK] * blocks, [num_keys] * blocks, 2 * blocks * pages_for(num_keys), heads)


def replayed_attention(ops: Ops, there: AttentionSample, name: str, calls: int) -> Replayed:
    """Calls of attention in a graph, one after the other; the sample is on the device of ``ops``."""
    return Replayed(lambda *_: [there.attend(ops) for _ in range(calls)], name, there.entries.kv_lengths)


# ---- attention by its layout -----------------------------------------------------------------------------------------

SPEED = "replayed attention"
"""Beginning of the names of ``speed_cases``."""
TIMED_LAYOUTS = ("TND", "TND16")
"""The layouts of which the faster one is chosen."""
CALLS = 4
"""Calls of attention in a graph."""
KV_LENGTHS = (544, 4096)
"""Keys that the entries of one or two sequences see, by case."""
FEW = tuple((4, num_keys) for num_keys in KV_LENGTHS)
"""Attention entries of BLOCK queries, before they are divided, and the keys that they see."""
MANY = ((8, 1024), (32, 1024))
"""The same of more sequences: the kernel has a faster path for few short entries alone (ops-transformer, the tiling of
flash_attention_infer)."""
NOT_TIMED = "not tried, because attention in this layout is not ok"


def speed_cases(by_layout: Mapping[str, Ops], working: Sequence[str]) -> Iterator[Case | tuple[str, str]]:
    """Attention of the same blocks in every timed layout; of a layout that does not work the name, and why not."""
    for blocks, num_keys in (*FEW, *MANY):
        sample = sample_of_rank(blocks, num_keys)
        for layout in TIMED_LAYOUTS:
            name = speed_name(layout, blocks, num_keys)
            yield speed_case(by_layout[layout], name, sample) if layout in working else (name, NOT_TIMED)


def speed_case(ops: Ops, name: str, sample: AttentionSample) -> Case:
    run = replayed_attention(ops, sample.on(ops), name, CALLS)
    return Case(name, run, lambda: [sample.attend(CPU)] * CALLS)


def speed_name(layout: str, blocks: int, num_keys: int) -> str:
    """The name of a speed case."""
    return f"{SPEED} {layout}, {CALLS} calls of {timed_name(blocks, num_keys)}"


def timed_name(blocks: int, num_keys: int) -> str:
    """What a report calls the attention of so many blocks."""
    return f"{blocks} blocks, {num_keys} keys"


# ---- the host's part of a replay -------------------------------------------------------------------------------------

MODULE = "scripts.selftest.times"
KEPT, CHANGED, IN_THREAD = "kept", "changed", "changed by a thread"
"""What becomes of the KV lengths of a replay."""
LENGTHS = (40, 41)
QUEUES = ("0", "1")
MAX_SECONDS = 600
"""Of the other process, which loads torch_npu and its kernels."""


def update_times(ops: Ops, repeats: int) -> dict[str, float]:
    """Median microseconds in which the host launches a replay with the attention of all layers, by what becomes of the
    lengths."""
    there = sample_of_rank(1, *capture_lengths(1)).on(ops)
    replay = replayed_attention(ops, there, "updates", NUM_LAYERS)

    def micros(name: str) -> float:
        replay.in_thread, lengths = name == IN_THREAD, cycle(LENGTHS[: 1 + (name != KEPT)])

        def launch() -> None:
            replay([next(lengths)] * len(there.entries.lengths))

        median_micros(launch, 2)
        return median_micros(launch, repeats, of_host=True)

    return {name: micros(name) for name in (KEPT, CHANGED, IN_THREAD)}


def own_queue() -> str:
    """The value of TASK_QUEUE_ENABLE that this process has; torch_npu's default is 1."""
    return str(number(os.environ.get(TASK_QUEUE, "1")))


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


# ---- the parts of a step, for ``python -m scripts.bench plan --device report.json`` ----------------------------------

BLOCKS = 2
TOKENS = BLOCKS * BLOCK
PRODUCTS = (
    ((S.heads + 2 * S.kv_heads) * S.dim // TP, S.hidden),
    (S.hidden, S.heads * S.dim // TP),
    (2 * S.inner // TP, S.hidden),
    (S.hidden, S.inner // TP),
)
"""(outputs, inputs) of a layer's products."""
LAYERS = 2
"""Their weights together are larger than the cache of a die."""
PART_CALLS = 16
"""Calls of attention, and of a small kernel, in the smaller graph."""


def added_micros(graph: Callable[[int], Replayed], calls: int, repeats: int) -> float:
    """Microseconds of a call in a graph of ``calls``. A graph of three times as many is timed, too, and the difference
    divided: so the cost of the replay itself is left out. ``graph`` makes a graph of so many calls."""
    micros = []
    for count in (calls, 3 * calls):
        replay = graph(count)
        replay()
        micros.append(median_micros(replay, repeats))
    return max(0.0, micros[1] - micros[0]) / (2 * calls)


def graph_of(call: Callable[[int], Tensor], calls: int) -> Replayed:
    """A graph of calls, each of which is given its number."""
    return Replayed(lambda _: [call(index) for index in range(calls)], "parts")


def part_times(ops: Ops, repeats: int) -> dict[str, float]:
    """Microseconds of a layer's products, of an attention and of a small kernel on a rank of TP 4 with TOKENS tokens,
    and the bytes that products and attention move."""
    weights = [[ops.stored(randn(*shape).to(ops.device)) for shape in PRODUCTS] for _ in range(LAYERS)]
    inputs = [randn(TOKENS, columns).to(ops.device) for _, columns in PRODUCTS]

    def layer(index: int) -> Tensor:
        return [ops.linear(x, weight) for x, weight in zip(inputs, weights[index % LAYERS], strict=True)][-1]

    num_keys = KV_LENGTHS[0]
    small = torch.zeros(TOKENS, dtype=torch.int32, device=ops.device)
    attention = partial(replayed_attention, ops, sample_of_rank(BLOCKS, num_keys).on(ops), "parts")
    return {
        "products_bytes": 2.0 * sum(rows * columns for rows, columns in PRODUCTS),
        "products_us": added_micros(partial(graph_of, layer), LAYERS, repeats),
        "attention_bytes": 4.0 * S.dim * (TOKENS * S.heads + num_keys * S.kv_heads) / TP,
        "attention_us": added_micros(attention, PART_CALLS, repeats),
        "small_us": added_micros(partial(graph_of, lambda _: small + small), PART_CALLS, repeats),
    }


# ---- all-reduces -----------------------------------------------------------------------------------------------------

SIZES = tuple(2**exponent for exponent in (*range(10, 21, 2), 21, 22, 23, 24))
"""Bytes of the all-reduces that are timed: up to more than the vector cores sum for 8 ranks, 1 MiB a rank. One of
Dream-7B with 128 tokens has 896 KiB."""
WARM_UP = 3
"""Runs for each size of all-reduce that are made first and not timed."""
SUMS = 8
"""All-reduces of a run: the host waits for the device once in a run, which takes longer than a small all-reduce."""


def by_size(micros: Callable[[Tensor], float], device: torch.device) -> dict[int, float]:
    return {size: micros(torch.zeros(size // 2, dtype=torch.bfloat16, device=device)) for size in SIZES}


def latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Median microseconds of an all-reduce, by its bytes, or of its launch by the host, where that takes longer. Every
    rank of the group must call it."""

    def micros(x: Tensor) -> float:
        durations = []
        for _ in range(WARM_UP + repeats):
            start = time.perf_counter()
            for _ in range(SUMS):
                group.all_reduce(x, "self-test")
            x[0].item()  # waits until they are done
            durations.append((time.perf_counter() - start) / SUMS)
        return 1e6 * statistics.median(durations[WARM_UP:])

    return by_size(micros, device)


def captured_latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Microseconds of an all-reduce in a replayed graph, by its bytes. Every rank of the group must call it."""
    summing = captured_group(group)

    def micros(x: Tensor) -> float:
        return added_micros(partial(graph_of, lambda _: summing.all_reduce(x, "self-test")), SUMS, repeats)

    return by_size(micros, device)


def slowest(by_rank: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By group and bytes, the time of the slowest rank, for the groups that all ranks have timed."""
    return {
        group: {size: max(times[group][size] for times in by_rank) for size in sizes}
        for group, sizes in by_rank[0].items()
        if all(group in times for times in by_rank)
    }


if __name__ == "__main__":
    from scripts.selftest.findings import eager_ops

    print(json.dumps(update_times(eager_ops(ATTENTION_LAYOUTS[0]), int(sys.argv[1]))))
