"""Checks whether a launch can work, and prints one line for each check. The launch scripts run it first.

    python -m scripts.preflight --device npu --tp 4 --bp 4 --model DIR    is this machine ready for an NPU server?
    python -m scripts.preflight --device cpu --tp 2 --bp 2                the bundled model on CPUs

It takes the flags of the launch scripts and checks: the mesh of ranks and the ports; with --device npu HCCL's ports,
the dies, the driver, CANN, the versions of torch and torch_npu, environment variables and the CPU affinity; the
network; the files of the model and of the adapter. A line begins with

  ok      the check has passed
  note    the launch may well work
  FAIL    the launch cannot work; the line ends with what to do

It takes about a second, starts nothing, and loads neither torch nor torch_npu. The exit status is 1 if any line says
FAIL, and 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - a machine's own python3 may be older
    sys.exit(f"{sys.executable} is older than Python 3.10; name another interpreter by PYTHON, e.g. PYTHON=python3.11")

# The launch scripts run this file from any folder, by an interpreter in which this project may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lopa_ascend.config import GRAPH_MODES_BY_DEVICE
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.config.npu_versions import INSTALL_INFO
from scripts.checks.launch import LAST_PORT, Finding, Launch, check_arguments
from scripts.checks.model import check_model
from scripts.checks.network import HCCL_BASE_PORT, check_hccl_ports, check_network
from scripts.checks.npu import (
    ROOT,
    VISIBLE,
    affinity_of,
    cann_version,
    check_affinity,
    check_cann,
    check_devices,
    check_driver,
    check_environment,
    check_npu_network,
    check_versions,
    installed_versions,
)

HCCL_TIMEOUT = "HCCL_EXEC_TIMEOUT"


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parses integers from ``low`` to ``high``, written as a shell reads them too: no sign, blank or leading zero."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def timeout(text: str) -> int:
    """Parses the seconds after which a silent rank is given up. Without the flag --timeout the launch scripts pass the
    value of ``HCCL_TIMEOUT``, so an error names the variable."""
    try:
        return integer(2, 86400)(text)
    except argparse.ArgumentTypeError as error:
        if text != os.environ.get(HCCL_TIMEOUT):
            raise
        raise argparse.ArgumentTypeError(f"{error}, the value of {HCCL_TIMEOUT}; set that or --timeout") from None


def graph_mode(text: str) -> str:
    """Parses a graph mode of an NPU server."""
    modes = GRAPH_MODES_BY_DEVICE["npu"]
    if text not in modes:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(modes)}, got {text!r}")
    return text


FLAGS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "tp": (integer(1, 4096), "N", "tensor parallel size: ranks that split each forward pass"),
    "bp": (integer(1, 4096), "N", "branch parallel size: groups of --tp ranks that take different branches"),
    "model": (Path, "DIR", "Hugging Face directory of a Dream or of a registered model (default: the bundled one)"),
    "lora_path": (Path, "DIR", "PEFT LoRA adapter"),
    "host": (str, "ADDRESS", "address of the HTTP server"),
    "port": (integer(1, LAST_PORT), "N", "port of the HTTP server; replica i takes this + i"),
    "master_addr": (str, "HOST", "address of node 0"),
    "master_port": (
        integer(1, LAST_PORT),
        "N",
        "port on which the ranks find each other; replica i takes this + i",
    ),
    "interface": (str, "NAME", "this node's interface on the network between the nodes"),
    "timeout": (timeout, "SECONDS", "how long a rank may hang before all end (HCCL with AIV: at most 1091)"),
    "max_restarts": (integer(0, 10**6), "N", "how often torchrun starts all ranks again"),
    "replicas": (integer(1, 256), "N", "independent servers on this node"),
    "nnodes": (integer(1, 4096), "N", "nodes of the server"),
    "node_rank": (integer(0, 4095), "N", "this node, from 0"),
    "graph_mode": (graph_mode, "MODE", "graph mode of an NPU server; after -- for the launch scripts"),
}
"""By field of Launch other than ``device``: how the flag is parsed, what its value is called, and its help."""


def parse_args(argv: list[str] | None = None) -> tuple[Launch, bool]:
    """The launch, and whether only its arguments are to be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.preflight",
        usage="%(prog)s --device {npu,cpu} --tp N --bp N [FLAGS OF A LAUNCH SCRIPT]",
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arguments-only", action="store_true", help="check the arguments, without a look at the machine"
    )
    parser.add_argument("--device", choices=("npu", "cpu"), required=True, help="where the model is to run")
    defaults = {field.name: field.default for field in fields(Launch)}
    for name, (parse, metavar, text) in FLAGS.items():
        required, default = defaults[name] is MISSING, defaults[name]
        shown = "" if required or default is None or "(default" in text else f" (default: {default})"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=parse, metavar=metavar, required=required, help=text + shown)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    arguments_only = given.pop("arguments_only")
    return Launch(**given), arguments_only


def check_machine(launch: Launch) -> Iterator[Finding]:
    """All checks that need a look at this machine."""
    if launch.device == "npu":
        home = Path(os.environ["ASCEND_HOME_PATH"]) if os.environ.get("ASCEND_HOME_PATH") else None
        yield from check_devices(launch, Path("/dev"), os.environ.get(VISIBLE))
        yield from check_driver(INSTALL_INFO, launch.graph_mode)
        yield from check_cann(home)
        cann = None if home is None else cann_version(home)
        yield from check_versions(installed_versions(sys.path, ROOT), cann, launch.graph_mode)
        yield from check_environment(os.environ, launch.graph_mode)
        yield from check_npu_network(launch, Path("/etc/hccn.conf"))
        yield from check_affinity(affinity_of(launch, os.environ), len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    yield from check_network(launch, Path("/sys/class/net"))
    yield from check_model(launch)


def main() -> int:
    launch, arguments_only = parse_args()
    findings = list(check_arguments(launch))
    if launch.device == "npu":
        findings += check_hccl_ports(launch, os.environ.get(HCCL_BASE_PORT))
    if not arguments_only:
        findings += check_machine(launch)
    print("\n".join(map(str, findings)), flush=True)
    return int(any(finding.verdict == "FAIL" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
