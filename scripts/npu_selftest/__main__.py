"""The first command on a machine with NPUs: do the ops compute there what the CPU computes, and which options to take?

python -m scripts.npu_selftest [--json FILE]                                     one NPU
torchrun --nproc-per-node 16 -m scripts.npu_selftest --tensor-parallel-size 4    every NPU of a node, and all-reduces

Each op runs at the shapes of Dream-7B in bfloat16, next to its definition, lopa_ascend/backend/cpu.py; then a captured
layer is replayed with other KV lengths; then, with several ranks, each group's all-reduce is timed. The report is made
to be sent to others: it names versions and devices, no paths and no hosts, and ends with the options for the server.

ok       computed as on the CPU
refused  it raised; there may be an option that does without
WRONG    it computed something else
asked    only asked; whatever the answer, the engine does without

The exit status is 1 if anything was computed wrongly, or if no options are left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, rank_in_environment
from lopa_ascend.parallel.mesh import Mesh
from scripts.npu_selftest.findings import Finding, examine_all, latencies, merged, options, slowest

VARIABLES = ("HCCL_OP_EXPANSION_MODE", "HCCL_BUFFSIZE", "TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF")


def run_rank(mesh: Mesh, repeats: int) -> tuple[list[Finding], dict[str, dict[str, float]]]:
    """What all ranks found, on every rank."""
    found, groups = examine_all(repeats), {"tp": mesh.tp, "bp": mesh.bp}
    device = torch.device("npu", torch.get_device_module("npu").current_device())
    times = {name: latencies(group, device, repeats) for name, group in groups.items() if group.size > 1}
    said = mesh.all_gather_text("self-test", json.dumps([[asdict(finding) for finding in found], times]))
    reports: list[Any] = [json.loads(text) for text in said]
    return merged([[Finding(**finding) for finding in report[0]] for report in reports]), slowest(
        [report[1] for report in reports]
    )


def stack() -> dict[str, str]:
    from lopa_ascend.backend.npu.versions import cann_version

    npu = torch.get_device_module("npu")
    versions = {name: metadata.version(name) for name in ("lopa-dist-ascend", "torch", "torch_npu")}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    device = f"{npu.get_device_name(npu.current_device())} ({npu.device_count()} visible)"
    return {**versions, "CANN": cann_version(), "device": device, **variables}


def text_of(report: dict[str, Any], found: Sequence[Finding]) -> str:
    lines = ["NPU self-test", *(f"  {name:24s} {value}" for name, value in report["stack"].items()), ""]
    lines.append(f"{'':8s} {'':58s} {'error':>8s} {'us a call':>10s}")
    for finding in found:
        error = "" if finding.error is None else f"{finding.error:8.5f}"
        micros = "" if finding.micros is None else f"{finding.micros:10.1f}"
        lines.append(f"{finding.verdict:8s} {finding.name:58s} {error:8s} {micros}".rstrip())
        lines += [f"{'':9s}{finding.message}"] if finding.message else []
        lines += [f"{'':9s}on ranks {', '.join(map(str, finding.ranks))}"] if finding.ranks else []
    lines.append("")
    for group, times in report["all_reduce_us"].items():
        lines.append(f"all-reduce, {group} groups: " + ", ".join(f"{n} B {us:.0f} us" for n, us in times.items()))
    if not report["all_reduce_us"]:
        lines.append("all-reduce: not measured, for this is one rank; torchrun starts several")
    chosen = report["options"] or "none: see above what was refused or wrong"
    return "\n".join([*lines, f"options for the server: {chosen}"])


def examine_node(tensor_parallel_size: int, repeats: int) -> tuple[dict[str, Any], list[Finding], int]:
    """(report, findings of all ranks, this rank).

    Raises:
        ValueError: there is no NPU for this rank, its software does not do, or the ranks do not divide.
        RankError: the ranks did not come together.
    """
    mesh = Mesh()
    if rank_in_environment() is not None:
        rendezvous, tp = Rendezvous.from_environment(), tensor_parallel_size
        config = EngineConfig(device="npu", tensor_parallel_size=tp, branch_parallel_size=rendezvous.world_size // tp)
        mesh = Mesh.join(config, rendezvous, exit_rank)
    found, times = run_rank(mesh, repeats)
    report = {
        "stack": stack(),
        "ranks": mesh.size,
        "findings": [asdict(finding) for finding in found],
        "all_reduce_us": times,
        "options": options(found),
    }
    mesh.close()
    return report, found, mesh.rank


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="timed calls an op (default: 20)")
    arguments = parser.parse_args(argv)
    try:
        report, found, rank = examine_node(arguments.tensor_parallel_size, arguments.repeats)
    except (ValueError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(text_of(report, found))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["options"] is None or any(finding.verdict == "WRONG" for finding in found))


if __name__ == "__main__":
    sys.exit(main())
