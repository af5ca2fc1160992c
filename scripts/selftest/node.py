"""Examines the NPUs of a node, one by each rank, and makes a report of what all ranks have found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lopa_ascend import __version__
from lopa_ascend.backend.interface import Ops
from lopa_ascend.backend.npu.environment import TASK_QUEUE
from lopa_ascend.backend.npu.environment import VARIABLES as ENVIRONMENT
from lopa_ascend.backend.npu.versions import driver_version
from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.coded import wrong_exchange
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, rank_in_environment
from lopa_ascend.parallel.mesh import Mesh
from scripts.bench.machine import versions_of
from scripts.selftest.findings import (
    ASKED_SUMS,
    Finding,
    announce,
    announced,
    attention_times,
    capture_works,
    captured_layout,
    chosen_layout,
    device_failure,
    eager_ops,
    examine,
    examine_all,
    examine_asked,
    merged,
    not_tried,
    options,
)
from scripts.selftest.hour import REFUSALS, shortened
from scripts.selftest.times import (
    FEW,
    SIZES,
    captured_latencies,
    fastest_queue,
    latencies,
    part_times,
    slowest,
    times_by_queue,
)
from tests.npu.cases import NUM_LAYERS
from tests.npu.exchanges import EXCHANGES, collectives_case, exchanges_case

T = TypeVar("T")
VARIABLES = ("HCCL_OP_EXPANSION_MODE", "HCCL_BUFFSIZE", "CPU_AFFINITY_CONF", *ENVIRONMENT)
"""Environment variables that the report names."""
ALL_REDUCES = "all-reduces between the ranks"
"""Name of the finding where they are refused. Without them no options are left."""
SUMS_ADVICE = (
    "if the times of all-reduces below say that it is faster, set LOPA_TP_EXPANSION_MODE=AIV_ONLY with --deterministic"
)
ASKED_SECONDS = 60
"""After which HCCL gives up a sum that the last question asks for."""


def examine_node(tensor_parallel_size: int, repeats: int) -> tuple[dict[str, Any], list[Finding], int]:
    """The report, the findings of all ranks, and this rank, which examines its NPU as those do that torchrun started.

    Raises:
        ValueError: there is no NPU for this rank, its software is too old, or the ranks do not divide evenly.
        RankError: the ranks did not come together.
    """
    mesh = _join(tensor_parallel_size)
    findings, times = _examine_rank(mesh, repeats)
    layout = captured_layout(findings) if mesh.rank == 0 else None
    report = {
        "stack": _software_and_device(),
        "ranks": mesh.size,
        "tensor_parallel_size": mesh.tp.size,
        "findings": [asdict(finding) for finding in findings],
        "attention_us": attention_times(findings),
        "all_reduce_us": times,
        "updates_us": _measured("host of replays", times_by_queue, layout, repeats),
        "parts": _measured("parts of a step", part_times, layout, repeats),
        "options": options(findings),
        "layout_of_few": chosen_layout(findings, FEW),
    }
    mesh.close()
    return report, findings, mesh.rank


def _measured(
    name: str, measure: Callable[[Ops, int], Mapping[str, Any]], layout: str | None, repeats: int
) -> Mapping[str, Any]:
    """What captured graphs take; empty where nothing can be captured."""
    if layout is None:
        return {}
    try:
        return measure(eager_ops(layout), repeats)
    except REFUSALS as error:
        announce(f"{name}: not timed: {shortened(error)}\n")
        return {}


def _join(tensor_parallel_size: int) -> Mesh:
    """Joins the ranks that torchrun has started. If it has started one, or none, this process is the only rank."""
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
    """
    groups = {name: group for name, group in (("tp", mesh.tp), ("bp", mesh.bp)) if group.size > 1}
    if not groups:
        return {}, []
    failure = first_failure(mesh, "devices", device_failure(device))
    if failure:
        return {}, [not_tried(ALL_REDUCES, f"not tried, because a device no longer computes: {failure}")]
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
        return {}, Finding(ASKED_SUMS, "asked", message=f"not tried: {failure}")
    times: dict[str, dict[int, float]] = {}

    def answer() -> str:
        grid = torch.arange(mesh.size).view(-1, mesh.tp.size)
        asked = vector_cores_alone(dist.get_backend())
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(grid.tolist(), pg_options=asked)[0]
        alone, like = Group(mesh.tp.rank, mesh.tp.size, group), torch.empty(0, dtype=torch.bfloat16, device=device)
        faults = [wrong_exchange(alone, "tp", 1, like, size // 2, None) for size in (SIZES[0], SIZES[-1])]
        times["tp, vector cores alone, captured"] = captured_latencies(alone, device, repeats)
        return next(filter(None, faults), f"right; {SUMS_ADVICE}")

    def find() -> Finding:
        try:
            return Finding(ASKED_SUMS, "asked", message=answer())
        except REFUSALS as error:
            return Finding(ASKED_SUMS, "asked", message=shortened(error))

    finding = announced(ASKED_SUMS, find)
    return times, finding


def vector_cores_alone(backend: str) -> Any:
    """Options of a communicator that may not leave the vector cores; None for a backend without any."""
    if backend != "hccl":
        return None
    from lopa_ascend.backend.npu import hccl

    return hccl.communicator_options("tp", ASKED_SECONDS, hccl.VECTOR_CORES_ALONE)


def examine_exchanges(mesh: Mesh, findings: Sequence[Finding], repeats: int) -> Finding:
    """Tries the collectives of a captured step, unless some rank has no captured attention that is ok: the others would
    wait for it, and then end."""
    layout = captured_layout(findings)
    failure = first_failure(mesh, "captured cases", "" if layout else "captured cases are not ok")
    if failure or layout is None:
        return not_tried(EXCHANGES, f"not tried: {failure}")
    on_all = partial(run_on_all, mesh, "captured exchanges")
    return examine(exchanges_case(eager_ops(layout), mesh.tp, mesh.bp, on_all), repeats)


def run_on_all(mesh: Mesh, subject: str, run: Callable[[], T]) -> T:
    """Runs something on all ranks, which must all call this; RuntimeError on all of them if it fails on one."""
    try:
        found = run()
    except REFUSALS as error:
        raise RuntimeError(first_failure(mesh, subject, shortened(error))) from error
    if failure := first_failure(mesh, subject, ""):
        raise RuntimeError(failure)
    return found


def first_failure(mesh: Mesh, subject: str, failure: str) -> str:
    """What has failed on the first rank on which something has, with the rank; empty if nothing has, as ``failure`` is
    then on this one."""
    failures = mesh.all_gather_text(subject, failure)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), "")


def _software_and_device() -> dict[str, str]:
    """What the findings may depend on, by name."""
    from lopa_ascend.backend.npu.versions import cann_version

    npu = torch.get_device_module("npu")
    # The project may run from a checkout without being installed, so that pip does not know its version.
    versions = {"lopa-dist-ascend": __version__, **versions_of(("torch", "torch_npu"))}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    device = f"{npu.get_device_name(npu.current_device())} ({npu.device_count()} visible)"
    return {**versions, "CANN": cann_version(), "driver": driver_version() or "unknown", "device": device, **variables}


def report_text(report: Mapping[str, Any], findings: Sequence[Finding]) -> str:
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
    conclusions = {
        "environment for the server": (queue := fastest_queue(report["updates_us"])) and f"{TASK_QUEUE}={queue}",
        "for one or two sequences at a time": _flag_of_few(report),
        "options for the server": report["options"] or "none: see above what was refused or wrong",
    }
    lines += ["", *(f"{name}: {text}" for name, text in {**_measured_texts(report), **conclusions}.items() if text)]
    return "\n".join(lines)


def _measured_texts(report: Mapping[str, Any]) -> dict[str, str]:
    """By name what was timed."""
    texts = {f"attention, {layout}": _listed(times) for layout, times in report["attention_us"].items()}
    sums = {group: {f"{size} B": us for size, us in times.items()} for group, times in report["all_reduce_us"].items()}
    texts |= {f"all-reduce, {group} groups": _listed(times) for group, times in sums.items()}
    if not sums:
        texts["all-reduce"] = "not measured with one rank; torchrun starts several"
    if parts := report["parts"]:
        speed = parts["products_bytes"] / max(parts["products_us"], 1e-3) / 1e6
        others = _listed({"attention": parts["attention_us"], "a small kernel": parts["small_us"]})
        texts["in a captured graph"] = f"products read {speed:.2f} TB/s; {others}"
    for queue, found in report["updates_us"].items():
        name = f"host of a replay, {NUM_LAYERS} KV lengths, {TASK_QUEUE}={queue}"
        texts[name] = found if isinstance(found, str) else _listed(found)
    return texts


def _listed(times: Mapping[str, float]) -> str:
    return "; ".join(f"{name} {us:.1f} us" for name, us in times.items())


def _flag_of_few(report: Mapping[str, Any]) -> str:
    """The layout for few sequences, where the options have another one."""
    few, chosen = report["layout_of_few"], report["options"]
    return f"--attention-layout {few}" if few and chosen and f" {few} " not in chosen else ""
