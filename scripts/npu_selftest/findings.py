"""What came out, and which options follow from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lopa_ascend.backend import load_ops
from lopa_ascend.config import ATTENTION_LAYOUTS, GRAPH_MODES_BY_DEVICE, EngineConfig
from lopa_ascend.parallel.collectives import Group
from scripts.npu_selftest.cases import (
    ASKED,
    CAPTURED,
    Case,
    asked_case,
    attention_cases,
    captured_case,
    elementwise_cases,
    linear_cases,
    write_cases,
)

TOLERANCE = 0.02
"""Largest error, as a share of the largest value: a few roundings of bfloat16."""
SIZES = tuple(2**exponent for exponent in range(10, 21, 2))
"""Bytes of the all-reduces. One of Dream-7B with 128 tokens has 896 KiB."""


@dataclass(frozen=True)
class Finding:
    """``error`` is the largest one as a share of the largest value, ``micros`` the median duration of a call; ``ranks``
    are those that found it, if there are several."""

    name: str
    verdict: str
    error: float | None = None
    micros: float | None = None
    message: str = ""
    ranks: tuple[int, ...] = ()


def examine(case: Case, repeats: int) -> Finding:
    try:
        got = together(case.run())
        micros = duration(case.run, repeats) if case.timed else None
    except RuntimeError as error:
        return Finding(case.name, "refused", message=" ".join(str(error).split())[:300])
    worst = max(relative_error(*pair) for pair in zip(got, together(case.expected), strict=True))
    verdict = "ok" if worst <= TOLERANCE else "WRONG"
    return Finding(case.name, verdict, worst, micros)


def duration(run: Callable[[], object], repeats: int) -> float:
    """Median microseconds until the device is done."""
    npu = torch.get_device_module("npu")
    durations = []
    for _ in range(repeats):
        npu.synchronize()
        start = time.perf_counter()
        run()
        npu.synchronize()
        durations.append(time.perf_counter() - start)
    return 1e6 * statistics.median(durations)


def together(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One or several, on the CPU."""
    return [tensor.cpu() for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Infinite where anything is not finite."""
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(error.nan_to_num(nan=float("inf")))


def examine_all(repeats: int) -> list[Finding]:
    """On this process's NPU. ``repeats`` is how often each op is timed."""
    by_layout = {
        layout: load_ops(EngineConfig(device="npu", graph_mode="eager", attention_layout=layout))
        for layout in ATTENTION_LAYOUTS
    }
    ops = next(iter(by_layout.values()))
    torch.manual_seed(0)
    cases = [*elementwise_cases(ops), *linear_cases(ops), *write_cases(ops)]
    found = [examine(case, repeats) for case in cases]
    for layout, layout_ops in by_layout.items():
        found += [examine(case, repeats) for case in attention_cases(layout_ops, layout)]
    layout = chosen_layout(found) or ATTENTION_LAYOUTS[0]
    found.append(examine(captured_case(by_layout[layout]), repeats))
    asked = examine(asked_case(ops, layout), repeats)  # last: an error of the device would stay with this process
    answer = {"ok": "the kernel does not mind", "WRONG": "the kernel computes something else"}
    return [*found, replace(asked, verdict="asked", message=answer.get(asked.verdict, asked.message))]


def chosen_layout(found: Sequence[Finding]) -> str | None:
    """The first in which all attention is right."""
    for layout in ATTENTION_LAYOUTS:
        if all(finding.verdict == "ok" for finding in found if finding.name.startswith(f"attention {layout},")):
            return layout
    return None


def options(found: Sequence[Finding]) -> str | None:
    """Flags for the server that do without what is not ok; None if none do."""
    layout = chosen_layout(found)
    avoidable = (CAPTURED, ASKED, *(f"attention {layout}," for layout in ATTENTION_LAYOUTS))
    if layout is None or any(f.verdict != "ok" and not f.name.startswith(avoidable) for f in found):
        return None
    captured = all(finding.verdict == "ok" for finding in found if finding.name == CAPTURED)
    mode = GRAPH_MODES_BY_DEVICE["npu"][0] if captured else "eager"
    return f"--device npu --attention-layout {layout} --graph-mode {mode}"


def latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Median microseconds of an all-reduce, by its bytes; every rank of the group must ask."""
    found = {}
    for size in SIZES:
        x, durations = torch.zeros(size // 2, dtype=torch.bfloat16, device=device), []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            group.all_reduce(x, "self-test")
            x[0].item()  # waits for it
            durations.append(time.perf_counter() - start)
        found[size] = 1e6 * statistics.median(durations[3:])
    return found


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Each check as the rank found it that it went worst on, and which ranks found the same."""
    order = ("ok", "asked", "refused", "WRONG")
    together = []
    for same in zip(*by_rank, strict=True):
        worst = max(same, key=lambda finding: order.index(finding.verdict))
        ranks = tuple(rank for rank, finding in enumerate(same) if finding.verdict == worst.verdict)
        together.append(replace(worst, ranks=ranks if len(ranks) < len(same) else ()))
    return together


def slowest(by_rank: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By group and size, what the slowest rank measured."""
    return {
        group: {size: max(found[group][size] for found in by_rank) for size in sizes}
        for group, sizes in by_rank[0].items()
    }
