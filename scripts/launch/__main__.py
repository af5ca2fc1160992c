"""Checks whether a launch can work, and prints one line for each check. The launch scripts run it first.

    python -m scripts.launch --device npu --tp 4 --bp 4 --model DIR    is this machine ready for an NPU server?
    python -m scripts.launch --device cpu --tp 2 --bp 2                the bundled model on CPUs

It takes the flags of the launch scripts and checks: the mesh of ranks and the ports; with --device npu HCCL's ports,
the dies and their health, the driver, CANN, the versions of torch and torch_npu, environment variables and the CPU
affinity; the network; the files of the model and of the adapter. A line begins with

  ok      the check has passed
  note    the launch may well work
  FAIL    the launch cannot work; the line ends with what to do

It takes about a second, and longer where npu-smi is slow. It starts nothing, and loads neither torch nor torch_npu. The
exit status is 1 if any line says FAIL, and 2 for a wrong flag.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 - a machine's own python3 may be older
    sys.exit(f"{sys.executable} is older than Python 3.10; name another interpreter by PYTHON, e.g. PYTHON=python3.11")

from lopa_ascend.backend.npu.versions import INSTALL_INFO
from scripts.launch.arguments import Launch, check_arguments, parse_args
from scripts.launch.findings import Finding
from scripts.launch.model import check_model
from scripts.launch.network import HCCL_BASE_PORT, check_hccl_ports, check_network
from scripts.launch.npu import (
    ROOT,
    VISIBLE,
    affinity_of,
    cann_version,
    check_affinity,
    check_cann,
    check_devices,
    check_driver,
    check_environment,
    check_health,
    check_npu_network,
    check_versions,
    installed_versions,
)


def check_machine(launch: Launch) -> Iterator[Finding]:
    """All checks that need a look at this machine."""
    if launch.device == "npu":
        home = Path(os.environ["ASCEND_HOME_PATH"]) if os.environ.get("ASCEND_HOME_PATH") else None
        yield from check_devices(launch, Path("/dev"), os.environ.get(VISIBLE))
        yield from check_health(launch, os.environ.get(VISIBLE))
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
    launch, arguments_only = parse_args(__doc__)
    findings = list(check_arguments(launch))
    if launch.device == "npu":
        findings += check_hccl_ports(launch, os.environ.get(HCCL_BASE_PORT))
    if not arguments_only:
        findings += check_machine(launch)
    print("\n".join(map(str, findings)), flush=True)
    return int(any(finding.verdict == "FAIL" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
