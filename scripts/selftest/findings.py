"""Examines the cases on this process's NPU, and derives the options for the server from what was found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from lopa_ascend.backend import find_device
from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import ATTENTION_LAYOUTS, GRAPH_MODES_BY_DEVICE, EngineConfig
from lopa_ascend.parallel.launch import rank_in_environment
from scripts.selftest.hour import REFUSALS, shortened
from scripts.selftest.times import (
    CALLS,
    FASTER,
    FEW,
    MANY,
    SPEED,
    TIMED_LAYOUTS,
    median_micros,
    speed_cases,
    speed_name,
    timed_name,
)
from tests.kernel_cases import Case, error_of
from tests.npu.captured_cases import captured_cases
from tests.npu.cases import ASKED, CAPTURED, EXPERTS, INT8, QWEN3, asked_case, attention_cases, step_cases

TOLERANCE = 0.02
"""Largest error that is ok, as a share of the largest value: a few roundings of bfloat16."""
VERDICTS = ("ok", "asked", "refused", "WRONG")
"""From the best to the worst."""
FIRST_LAYOUT = ATTENTION_LAYOUTS[0]
ASKED_SUMS = "all-reduces on the vector cores alone"
"""Name of the question whether a communicator may keep large sums there, too."""


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
    timed = speed_cases(by_layout, working_layouts(findings))
    findings += examine_cases(timed, f"{SPEED}, further cases", repeats)
    captured_ops = by_layout[chosen_layout(findings) or FIRST_LAYOUT]
    findings += examine_cases(captured_cases(captured_ops), f"{CAPTURED} layer, further cases", repeats)
    findings += examine_cases(expert_cases(ops), f"{EXPERTS}: further cases", repeats)
    return findings + examine_cases(int8_cases(ops), f"{INT8}: further cases", repeats)


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
