"""Examines the cases on this process's NPU, and derives the options for the server from what was found."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from lopa_ascend.backend import find_device
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import ATTENTION_LAYOUTS, GRAPH_MODES_BY_DEVICE, EngineConfig
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.parallel.launch import rank_in_environment
from scripts.selftest.hour import shortened
from scripts.selftest.speed import CALLS, FEW, MANY, SPEED, TIMED_LAYOUTS, speed_cases, speed_name
from tests.kernel_cases import Case, error_of
from tests.npu.captured_cases import captured_cases
from tests.npu.cases import ASKED, CAPTURED, EXPERTS, INT8, QWEN3, asked_case, attention_cases, step_cases

TOLERANCE = 0.02
"""Largest error that is ok, as a share of the largest value: a few roundings of bfloat16."""
VERDICTS = ("ok", "asked", "refused", "WRONG")
"""From the best to the worst."""
SIZES = tuple(2**exponent for exponent in (*range(10, 21, 2), 21, 22, 23, 24))
"""Bytes of the all-reduces that are timed: up to more than the vector cores sum for 8 ranks, 1 MiB a rank. One of
Dream-7B with 128 tokens has 896 KiB."""
FASTER = 0.95
"""The share of the first layout's time that another one may take at most to be chosen instead."""
FIRST_LAYOUT = ATTENTION_LAYOUTS[0]
NOT_TIMED = "not tried, because attention in this layout is not ok"
WARM_UP = 3
"""Runs for each size of all-reduce that are made first and not timed."""
SUMS = 8
"""All-reduces of a run: the host waits for the device once in a run, which takes longer than a small all-reduce."""
ASKED_SUMS = "all-reduces on the vector cores alone"
"""Name of the question whether a communicator may keep large sums there, too."""
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError)
"""What an op raises that the device or this torch_npu cannot run."""


@dataclass(frozen=True)
class Finding:
    """What was found about one case."""

    name: str
    verdict: str
    """One of ``VERDICTS``."""
    error: float | None = None
    """The largest error as a share of the largest value; None if nothing was computed."""
    micros: float | None = None
    """Median duration of a call in microseconds; None if calls were not timed."""
    message: str = ""
    """Why the op was refused, or the answer to what was asked."""
    ranks: tuple[int, ...] = ()
    """The ranks with this finding; empty if all have it."""


def announce(text: str) -> None:
    """Writes to stderr at once, on rank 0. What was written is not lost where the device hangs or ends the process."""
    if rank_in_environment() in (None, 0):
        sys.stderr.write(text)
        sys.stderr.flush()


def announced(name: str, find: Callable[[], Finding]) -> Finding:
    """What is found. The name is written before it is looked for, the verdict after it."""
    announce(f"{name} ... ")
    finding = find()
    announce(f"{': '.join(filter(None, (finding.verdict, finding.message)))}\n")
    return finding


def not_tried(name: str, message: str) -> Finding:
    """The finding of what is refused without a try, after a line about it."""
    return announced(name, lambda: Finding(name, "refused", message=message))


def examine(case: Case, repeats: int) -> Finding:
    """Runs a case, compares its result, and times it."""
    return announced(case.name, partial(_examine, case, repeats))


def _examine(case: Case, repeats: int) -> Finding:
    try:
        error = error_of(case, case.run())
        micros = median_micros(case.run, repeats) if case.timed else None
    except REFUSALS as refusal:
        return Finding(case.name, "refused", message=shortened(refusal))
    most = TOLERANCE if case.most is None else case.most
    return Finding(case.name, "ok" if error <= most else "WRONG", error, micros)


def examine_cases(cases: Iterable[Case | tuple[str, str]], rest: str, repeats: int) -> list[Finding]:
    """Examines cases, whose inputs are put on the device one case after the other.

    A kernel may have left the device unusable. Then no further inputs can be made, and what was found until then is
    kept. ``rest`` is the name of the finding that stands for all further cases.

    Args:
        cases: or the name of one that is not to be tried, and why.
    """
    findings: list[Finding] = []
    try:
        for case in cases:
            findings.append(examine(case, repeats) if isinstance(case, Case) else not_tried(*case))
    except REFUSALS as error:
        findings.append(not_tried(rest, f"not tried: {shortened(error)}"))
    return findings


def median_micros(run: Callable[[], object], repeats: int) -> float:
    """Median microseconds from a call until the device is done."""
    npu = torch.get_device_module("npu")
    durations = []
    for _ in range(repeats):
        npu.synchronize()
        start = time.perf_counter()
        run()
        npu.synchronize()
        durations.append(time.perf_counter() - start)
    return 1e6 * statistics.median(durations)


def examine_all(repeats: int) -> list[Finding]:
    """Examines all cases on this process's NPU but the asked one. A kernel may leave the device unusable, so what the
    options for the server need comes first."""
    by_layout = {layout: eager_ops(layout) for layout in ATTENTION_LAYOUTS}
    ops = next(iter(by_layout.values()))
    from tests.npu.op_cases import expert_cases, float_cases, int8_cases  # need torch_npu, as ops do

    torch.manual_seed(0)
    needed = chain(float_cases(ops), step_cases(ops))
    findings = examine_cases(needed, "further ops", repeats)
    for layout, layout_ops in by_layout.items():
        findings += examine_cases(attention_cases(layout_ops, layout), f"attention {layout}, further cases", repeats)
    findings += examine_cases(timed_cases(by_layout, working_layouts(findings)), f"{SPEED}, further cases", repeats)
    captured_ops = by_layout[chosen_layout(findings) or FIRST_LAYOUT]
    findings += examine_cases(captured_cases(captured_ops), f"{CAPTURED} layer, further cases", repeats)
    findings += examine_cases(expert_cases(ops), f"{EXPERTS}: further cases", repeats)
    return findings + examine_cases(int8_cases(ops), f"{INT8}: further cases", repeats)


def timed_cases(by_layout: Mapping[str, Ops], working: Sequence[str]) -> Iterator[Case | tuple[str, str]]:
    """The cases that are timed to choose a layout; refused where attention in the layout is not ok."""
    for layout, case in speed_cases(by_layout):
        yield case if layout in working else (case.name, NOT_TIMED)


def eager_ops(layout: str) -> Ops:
    """The ops of this process's NPU with one layout of attention."""
    config = EngineConfig(device="npu", graph_mode="eager", attention_layout=layout)
    return find_device(config.device).load_ops(config)


def examine_asked(findings: Sequence[Finding], repeats: int) -> Finding:
    """Tries a call of a kernel that the engine avoids. An error may leave the device unusable, so this comes last."""

    def cases() -> Iterator[Case]:  # a generator, so that ``examine_cases`` catches what making the case raises
        yield asked_case(eager_ops(chosen_layout(findings) or FIRST_LAYOUT))

    (asked,) = examine_cases(cases(), ASKED, repeats)
    answers = {"ok": "the kernel does not mind", "WRONG": "the kernel computes something else"}
    return replace(asked, verdict="asked", message=answers.get(asked.verdict, asked.message))


def working_layouts(findings: Sequence[Finding]) -> list[str]:
    """The attention layouts in which every case is ok."""
    return [
        layout
        for layout in ATTENTION_LAYOUTS
        if all(finding.verdict == "ok" for finding in findings if finding.name.startswith(f"attention {layout},"))
    ]


def chosen_layout(findings: Sequence[Finding], timed: Sequence[tuple[int, int]] | None = None) -> str | None:
    """Of the attention layouts that work the first one, or one that is clearly faster in the cases of ``timed``, or in
    all; None if none works."""
    working = working_layouts(findings)
    if not working:
        return None
    names = {timed_name(*case) for case in timed or (*FEW, *MANY)}
    times = {
        layout: sum(us for name, us in by_case.items() if name in names)
        for layout, by_case in attention_times(findings).items()
    }
    first = working[0]
    faster = [layout for layout in working if layout in times and times[layout] < FASTER * times.get(first, 0.0)]
    return min(faster, key=times.__getitem__, default=first)


def attention_times(findings: Sequence[Finding]) -> dict[str, dict[str, float]]:
    """Microseconds of attention in a graph, by layout and ``timed_name``, for the layouts in which all was ok."""
    micros = {finding.name: finding.micros for finding in findings if finding.verdict == "ok"}
    times: dict[str, dict[str, float]] = {}
    for layout in TIMED_LAYOUTS:
        by_case = {timed_name(*case): micros.get(speed_name(layout, *case)) for case in (*FEW, *MANY)}
        measured = {name: taken / CALLS for name, taken in by_case.items() if taken is not None}
        if len(measured) == len(by_case):
            times[layout] = measured
    return times


def timed_name(blocks: int, num_keys: int) -> str:
    """What a report calls the attention of so many blocks."""
    return f"{blocks} blocks, {num_keys} keys"


def options(findings: Sequence[Finding]) -> str | None:
    """Flags with which the server does without everything that is not ok; None if there are none. They do not
    quantise, whether the ops of W8A8 are ok or not."""
    layout = chosen_layout(findings)
    avoidable = (
        CAPTURED,
        SPEED,
        ASKED,
        ASKED_SUMS,
        EXPERTS,
        INT8,
        QWEN3,
        *(f"attention {layout}," for layout in ATTENTION_LAYOUTS),
    )
    needed = [finding for finding in findings if not finding.name.startswith(avoidable)]
    if layout is None or any(finding.verdict != "ok" for finding in needed):
        return None
    mode = GRAPH_MODES_BY_DEVICE["npu"][0] if capture_works(findings) else "eager"
    return f"--device npu --attention-layout {layout} --graph-mode {mode}"


def capture_works(findings: Sequence[Finding]) -> bool:
    """Whether everything is ok that only graph modes need."""
    return all(finding.verdict == "ok" for finding in findings if finding.name.startswith(CAPTURED))


def captured_layout(findings: Sequence[Finding]) -> str | None:
    """The chosen layout if steps can be captured with it."""
    return chosen_layout(findings) if capture_works(findings) else None


def latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Median microseconds of an all-reduce, by its bytes, or of its launch by the host, where that takes longer. Every
    rank of the group must call it."""
    medians = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        durations = []
        for _ in range(WARM_UP + repeats):
            start = time.perf_counter()
            for _ in range(SUMS):
                group.all_reduce(x, "self-test")
            x[0].item()  # waits until they are done
            durations.append((time.perf_counter() - start) / SUMS)
        medians[size] = 1e6 * statistics.median(durations[WARM_UP:])
    return medians


def device_failure(device: torch.device) -> str:
    """Why a device no longer computes; empty if it does."""
    try:
        torch.ones(1, device=device).cpu()
    except REFUSALS as error:
        return shortened(error)
    return ""


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """For each case the worst finding of all ranks, with the ranks of the same verdict unless these are all ranks.

    A rank whose device has become unusable has no findings of the cases that it has not tried.
    """
    names = dict.fromkeys(finding.name for findings in by_rank for finding in findings)
    worst_findings = []
    for name in names:
        found = {rank: f for rank, findings in enumerate(by_rank) for f in findings if f.name == name}
        worst = max(found.values(), key=lambda finding: VERDICTS.index(finding.verdict))
        ranks = tuple(rank for rank, finding in found.items() if finding.verdict == worst.verdict)
        worst_findings.append(replace(worst, ranks=ranks if len(ranks) < len(by_rank) else ()))
    return worst_findings


def slowest(by_rank: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By group and bytes, the time of the slowest rank, for the groups that all ranks have timed."""
    return {
        group: {size: max(times[group][size] for times in by_rank) for size in sizes}
        for group, sizes in by_rank[0].items()
        if all(group in times for times in by_rank)
    }
