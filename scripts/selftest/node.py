"""Examines the NPUs of a node, one by each rank, and makes a report of what all ranks have found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from lopa_ascend import __version__
from lopa_ascend.backend.npu import environment as npu_environment
from lopa_ascend.backend.npu.versions import driver_version
from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, rank_in_environment
from lopa_ascend.parallel.mesh import Mesh
from scripts.selftest.cases import ASKED_SUMS
from scripts.selftest.exchanges import EXCHANGES, collectives_case, exchanges_case
from scripts.selftest.findings import (
    REFUSALS,
    SIZES,
    Finding,
    announce,
    announce_verdict,
    announced,
    attention_times,
    capture_works,
    chosen_layout,
    device_failure,
    eager_ops,
    examine,
    examine_all,
    examine_asked,
    latencies,
    merged,
    options,
    slowest,
)
from scripts.selftest.hour import shortened
from scripts.selftest.parts import captured_latencies, part_times
from scripts.selftest.speed import FEW
from scripts.selftest.updates import CALLS as UPDATED_CALLS
from scripts.selftest.updates import fastest_queue, times_by_queue

VARIABLES = ("HCCL_OP_EXPANSION_MODE", "HCCL_BUFFSIZE", "CPU_AFFINITY_CONF", *npu_environment.VARIABLES)
"""Environment variables that the report names."""
ALL_REDUCES = "all-reduces between the ranks"
"""Name of the finding where they are refused. Without them no options are left."""
SUMS_ADVICE = (
    "if the times of all-reduces below say that it is faster, set LOPA_TP_EXPANSION_MODE=AIV_ONLY with --deterministic"
)
LEAST_AND_MOST = (SIZES[0], SIZES[-1])
ASKED_SECONDS = 60
"""After which HCCL gives up a sum that the last question asks for."""


def examine_node(tensor_parallel_size: int, repeats: int) -> tuple[dict[str, Any], list[Finding], int]:
    """Examines this rank's NPU, together with the other ranks if torchrun has started several.

    Args:
        tensor_parallel_size: ranks of a tensor parallel group.
        repeats: timed calls of each op.

    Returns:
        The report, the findings of all ranks, and this rank.

    Raises:
        ValueError: there is no NPU for this rank, its software is too old, or the ranks do not divide evenly.
        RankError: the ranks did not come together.
    """
    mesh = _join(tensor_parallel_size)
    findings, times = _examine_rank(mesh, repeats)
    updates = _update_times(findings, repeats) if mesh.rank == 0 else {}
    parts = _part_times(findings, repeats) if mesh.rank == 0 else {}
    report = {
        "stack": _software_and_device(),
        "ranks": mesh.size,
        "tensor_parallel_size": mesh.tp.size,
        "findings": [asdict(finding) for finding in findings],
        "attention_us": attention_times(findings),
        "all_reduce_us": times,
        "updates_us": updates,
        "parts": parts,
        "options": options(findings),
        "layout_of_few": chosen_layout(findings, FEW),
    }
    mesh.close()
    return report, findings, mesh.rank


def _update_times(findings: Sequence[Finding], repeats: int) -> dict[str, dict[str, float] | str]:
    """What replays cost the host, by TASK_QUEUE_ENABLE; empty where nothing can be captured."""
    layout = chosen_layout(findings)
    if layout is None or not capture_works(findings):
        return {}
    return times_by_queue(eager_ops(layout), repeats)


def _part_times(findings: Sequence[Finding], repeats: int) -> dict[str, float]:
    """See ``part_times``; empty where nothing can be captured."""
    layout = chosen_layout(findings)
    if layout is None or not capture_works(findings):
        return {}
    try:
        return part_times(eager_ops(layout), repeats)
    except REFUSALS as error:
        announce(f"parts of a step: not timed: {shortened(error)}\n")
        return {}


def _join(tensor_parallel_size: int) -> Mesh:
    """Joins the ranks that torchrun has started. If it has started one, or none, this process is the only rank.

    Raises:
        ValueError, RankError: as ``examine_node``.
    """
    tp, flag = tensor_parallel_size, f"--tensor-parallel-size {tensor_parallel_size}"
    if rank_in_environment() is None:
        if tp > 1:
            command = f"scripts/launch/node.sh --tp {tp} --bp 1 --selftest"
            raise ValueError(f"{flag} needs {tp} ranks or a multiple: {command}")
        return Mesh()
    rendezvous = Rendezvous.from_environment()
    bp, left_over = divmod(rendezvous.world_size, tp)
    if left_over:
        raise ValueError(f"{flag} does not divide {rendezvous.world_size} ranks; start a multiple of {tp}")
    if rendezvous.world_size == 1:
        return Mesh()
    config = EngineConfig(device="npu", tensor_parallel_size=tp, branch_parallel_size=bp)
    return Mesh.join(config, rendezvous, exit_rank)


def _examine_rank(mesh: Mesh, repeats: int) -> tuple[list[Finding], dict[str, dict[str, float]]]:
    """What all ranks have found: the findings, and by group and bytes the microseconds of an all-reduce."""
    findings = examine_all(repeats)
    device = torch.device("npu", torch.get_device_module("npu").current_device())
    times, of_groups = examine_groups(mesh, device, findings, repeats)
    findings += of_groups
    findings.append(examine_asked(findings, repeats))
    if mesh.tp.size > 1:
        found, finding = ask_vector_cores(mesh, device, findings, repeats)
        times |= found
        findings.append(finding)
    texts = mesh.all_gather_text("self-test", json.dumps([[asdict(finding) for finding in findings], times]))
    by_rank = [json.loads(text) for text in texts]
    findings_by_rank = [[Finding(**finding) for finding in of_rank] for of_rank, _ in by_rank]
    times_by_rank = [of_rank for _, of_rank in by_rank]
    return merged(findings_by_rank), slowest(times_by_rank)


def examine_groups(
    mesh: Mesh, device: torch.device, findings: Sequence[Finding], repeats: int
) -> tuple[dict[str, dict[int, float]], list[Finding]]:
    """Microseconds of an all-reduce by group and bytes, and what was found about collectives between the ranks.

    Nothing is tried if the device of some rank no longer computes: the others would wait for it, and then end.

    Args:
        findings: what this rank has found before.
        repeats: timed calls of each all-reduce.
    """
    groups = {name: group for name, group in (("tp", mesh.tp), ("bp", mesh.bp)) if group.size > 1}
    if not groups:
        return {}, []
    failure = first_failure(mesh, "devices", device_failure(device))
    if failure:
        message = f"not tried, because a device no longer computes: {failure}"
        return {}, [announced(Finding(ALL_REDUCES, "refused", message=message))]
    announce(f"{ALL_REDUCES} ... ")
    try:
        times = {name: latencies(group, device, repeats) for name, group in groups.items()}
    except RankError as error:
        announce(f"refused: {shortened(error)}\n")
        return {}, [Finding(ALL_REDUCES, "refused", message=shortened(error))]
    announce("timed\n")
    captured = examine(collectives_case(list(groups.values()), device), repeats)
    exchanges = examine_exchanges(mesh, findings, repeats)
    works = all(finding.verdict == "ok" for finding in (captured, exchanges))
    if not first_failure(mesh, "captured collectives", "" if works else "a case is not ok"):
        announce(f"{ALL_REDUCES}, captured ... ")
        times |= {f"{name}, captured": captured_latencies(group, device, repeats) for name, group in groups.items()}
        announce("timed\n")
    return times, [captured, exchanges]


def ask_vector_cores(
    mesh: Mesh, device: torch.device, findings: Sequence[Finding], repeats: int
) -> tuple[dict[str, dict[int, float]], Finding]:
    """Tries and times the sums of a communicator that may not leave the vector cores (HCCL's AIV_ONLY). The engine has
    one if a variable says so.

    Large sums leave them otherwise, and the answer tells what that costs. A device may hang, so this comes last.
    """
    failure = "" if capture_works(findings) and not device_failure(device) else "captured cases are not ok"
    if failure := first_failure(mesh, "vector cores", failure):
        return {}, announced(Finding(ASKED_SUMS, "asked", message=f"not tried: {failure}"))
    announce(f"{ASKED_SUMS} ... ")
    grid = torch.arange(mesh.size).view(-1, mesh.tp.size)
    try:
        asked = vector_cores_alone(dist.get_backend())
        made = dist.new_subgroups_by_enumeration(grid.tolist(), pg_options=asked)
        group: dist.ProcessGroup = made[0]
        alone = Group(mesh.tp.rank, mesh.tp.size, group)
        is_right = sums_are_right(alone, device)
        times = {"tp, vector cores alone, captured": captured_latencies(alone, device, repeats)}
    except (RankError, *REFUSALS) as error:
        times, message = {}, shortened(error)
    else:
        message = f"right; {SUMS_ADVICE}" if is_right else "the sums are WRONG"
    finding = Finding(ASKED_SUMS, "asked", message=message)
    announce_verdict(finding)
    return times, finding


def sums_are_right(group: Group, device: torch.device) -> bool:
    """Whether the smallest and the largest sum that is timed is exact: rank r gives 2 ** r. All ranks must call it."""
    given = [torch.full((size // 2,), 2.0**group.rank, dtype=torch.bfloat16, device=device) for size in LEAST_AND_MOST]
    sums = [group.all_reduce(x, "self-test") for x in given]
    return all(bool((found == 2.0**group.size - 1).all()) for found in sums)


def vector_cores_alone(backend: str) -> Any:
    """Options of a communicator that may not leave the vector cores; None for a backend without any."""
    if backend != "hccl":
        return None
    from lopa_ascend.backend.npu import hccl

    return hccl.communicator_options("tp", ASKED_SECONDS, hccl.VECTOR_CORES_ALONE)


def examine_exchanges(mesh: Mesh, findings: Sequence[Finding], repeats: int) -> Finding:
    """Tries the collectives of a captured step, unless some rank has no captured attention that is ok: the others would
    wait for it, and then end."""
    layout = chosen_layout(findings)
    failure = "" if layout and capture_works(findings) else "captured cases are not ok"
    failure = first_failure(mesh, "captured cases", failure)
    if failure:
        return announced(Finding(EXCHANGES, "refused", message=f"not tried: {failure}"))
    assert layout is not None
    ops = eager_ops(layout)
    return examine(exchanges_case(ops, mesh.tp, mesh.bp, raises_on_all(mesh, "captured exchanges")), repeats)


def raises_on_all(mesh: Mesh, subject: str) -> Callable[[str], None]:
    """A function that every rank calls with what has failed there, or "", and that raises RuntimeError on all ranks if
    anything has.

    Args:
        subject: as for ``Mesh.all_gather_text``.
    """

    def agree(failure: str) -> None:
        found = first_failure(mesh, subject, failure)
        if found:
            raise RuntimeError(found)

    return agree


def first_failure(mesh: Mesh, subject: str, failure: str) -> str:
    """What has failed on the first rank on which something has, with the rank; empty if nothing has.

    Args:
        subject: as for ``Mesh.all_gather_text``.
        failure: what has failed on this rank; empty if nothing has.
    """
    failures = mesh.all_gather_text(subject, failure)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), "")


def _software_and_device() -> dict[str, str]:
    """What the findings may depend on, by name."""
    from lopa_ascend.backend.npu.versions import cann_version

    npu = torch.get_device_module("npu")
    # The project may run from a checkout without being installed, so that pip does not know its version.
    versions = {"lopa-dist-ascend": __version__, **{name: metadata.version(name) for name in ("torch", "torch_npu")}}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    device = f"{npu.get_device_name(npu.current_device())} ({npu.device_count()} visible)"
    return {**versions, "CANN": cann_version(), "driver": driver_version() or "unknown", "device": device, **variables}


def report_text(report: dict[str, Any], findings: Sequence[Finding]) -> str:
    """The report as it is printed."""
    lines = ["NPU self-test"]
    lines += [f"  {name:24s} {value}" for name, value in report["stack"].items()]
    lines += ["", f"{'':8s} {'':58s} {'error':>8s} {'us a call':>10s}"]
    for finding in findings:
        error = "" if finding.error is None else f"{finding.error:8.5f}"
        micros = "" if finding.micros is None else f"{finding.micros:10.1f}"
        lines.append(f"{finding.verdict:8s} {finding.name:58s} {error:8s} {micros}".rstrip())
        if finding.message:
            lines.append(f"{'':9s}{finding.message}")
        if finding.ranks:
            lines.append(f"{'':9s}on ranks {', '.join(map(str, finding.ranks))}")
    lines.append("")
    for layout, by_case in report["attention_us"].items():
        lines.append(f"attention, {layout}: " + "; ".join(f"{name} {us:.1f} us" for name, us in by_case.items()))
    for group, times in report["all_reduce_us"].items():
        lines.append(f"all-reduce, {group} groups: " + ", ".join(f"{n} B {us:.0f} us" for n, us in times.items()))
    if not report["all_reduce_us"]:
        lines.append("all-reduce: not measured with one rank; torchrun starts several")
    if parts := report["parts"]:
        speed = parts["products_bytes"] / max(parts["products_us"], 1e-3) / 1e6
        others = f"attention {parts['attention_us']:.1f} us, a small kernel {parts['small_us']:.1f} us"
        lines.append(f"in a captured graph: products read {speed:.2f} TB/s, {others}")
    for queue, found in report["updates_us"].items():
        by_kind = found if isinstance(found, str) else ", ".join(f"{kind} {us:.0f} us" for kind, us in found.items())
        lines.append(f"host of a replay, {UPDATED_CALLS} KV lengths, {npu_environment.TASK_QUEUE}={queue}: {by_kind}")
    if fastest := fastest_queue(report["updates_us"]):
        lines.append(f"environment for the server: {npu_environment.TASK_QUEUE}={fastest}")
    few = report["layout_of_few"]
    if few and report["options"] and f" {few} " not in report["options"]:
        lines.append(f"for one or two sequences at a time: --attention-layout {few}")
    chosen = report["options"] or "none: see above what was refused or wrong"
    return "\n".join([*lines, f"options for the server: {chosen}"])
