"""Every check before a launch, on directories made for it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lopa_ascend.backend.npu.versions import can_run
from lopa_ascend.demo import DEMO_MODEL
from scripts.launch.arguments import Launch
from scripts.launch.findings import Finding
from scripts.launch.network import check_network
from scripts.launch.npu import (
    CONTROL_DEVICES,
    affinity_of,
    check_affinity,
    check_cann,
    check_devices,
    check_driver,
    check_environment,
    check_npu_network,
    check_versions,
    installed_versions,
)
from tests.ports import free_ports, listening

ROOT = Path(__file__).resolve().parents[2]
NODE = Launch(device="npu", tp=4, bp=4)


def lines_of(findings: Iterator[Finding]) -> list[str]:
    return [str(finding) for finding in findings]


@pytest.mark.parametrize(
    ("dies", "visible", "launch", "lines"),
    [
        (0, None, NODE, ["FAIL  devices: {dev} has no davinciN; install the driver, or start the container with its"]),
        (16, None, NODE, ["ok    devices: dies 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 of 16"]),
        (8, None, NODE, ["FAIL  devices: 16 ranks on as many dies, but {dev} has 8; lower --bp"]),
        (16, "0-15", NODE, ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES is '0-15'; give numbers and commas alone"]),
        (16, "0, 1", NODE, ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES is '0, 1'; give numbers and commas alone"]),
        (16, "0,1", replace(NODE, tp=1, bp=3), ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES names 2 dies for 3 ranks"]),
        (16, "1,0", replace(NODE, tp=1, bp=2), ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES is 1,0, but CANN takes"]),
        (16, "1,1", replace(NODE, tp=1, bp=2), ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES is 1,1, but CANN takes"]),
        (
            4,
            "3,4",
            replace(NODE, tp=1, bp=2),
            ["FAIL  devices: ASCEND_RT_VISIBLE_DEVICES names die 4, but {dev} has 4"],
        ),
        (16, "3,4,8", replace(NODE, tp=1, bp=3), ["ok    devices: dies 3, 4, 8 of 16"]),
        (
            16,
            "3,4,6,7",
            replace(NODE, tp=2, bp=2),
            [
                "ok    devices: dies 3, 4, 6, 7 of 16",
                "note  devices: neighbours in a TP group that are on different packages: 3 and 4",
            ],
        ),
        (16, None, replace(NODE, bp=8, nnodes=2), ["ok    devices: dies 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13"]),
    ],
)
def test_devices(tmp_path: Path, dies: int, visible: str | None, launch: Launch, lines: list[str]):
    for die in range(dies):
        (tmp_path / f"davinci{die + 100}").touch()  # a container's may have any numbers
    for name in CONTROL_DEVICES:
        (tmp_path / name).touch()
    found = lines_of(check_devices(launch, tmp_path, visible))
    assert len(found) == len(lines)
    for line, beginning in zip(found, lines, strict=True):
        assert line.startswith(beginning.format(dev=tmp_path))


def test_a_container_without_the_driver_s_control_devices(tmp_path: Path):
    for name in ("davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    found = lines_of(check_devices(replace(NODE, tp=1, bp=1), tmp_path, None))
    assert found == [
        f"FAIL  devices: {tmp_path} has no devmm_svm and no hisi_hdc; load the driver, or start the container with them"
    ]


def test_the_network_between_npus_is_not_tried(tmp_path: Path):
    file = tmp_path / "hccn.conf"
    assert lines_of(check_npu_network(NODE, file)) == []
    (found,) = lines_of(check_npu_network(replace(NODE, nnodes=2), file))
    assert found.startswith(f"note  NPU network: not tried, and {file} is missing: a container needs the host's; docs/")
    file.touch()
    (found,) = lines_of(check_npu_network(replace(NODE, nnodes=2), file))
    assert found.startswith("note  NPU network: not tried; docs/deploy.md")


def test_cann(tmp_path: Path):
    remedy = "; source CANN's set_env.sh, e.g. /usr/local/Ascend/cann/set_env.sh"
    assert lines_of(check_cann(None)) == ["FAIL  CANN: ASCEND_HOME_PATH is not set" + remedy]
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libascendcl.so").touch()
    assert lines_of(check_cann(tmp_path)) == [f"FAIL  CANN: {tmp_path}/lib64 has no libhccl.so{remedy}"]
    (tmp_path / "lib64/libhccl.so").touch()
    assert lines_of(check_cann(tmp_path)) == [f"ok    CANN: {tmp_path}, version unknown"]
    (tmp_path / "aarch64-linux").mkdir()
    info = "package_name=Ascend-cann-toolkit\ninnerversion=V100R001\nversion=9.1.0\n"
    (tmp_path / "aarch64-linux/ascend_toolkit_install.info").write_text(info)
    assert lines_of(check_cann(tmp_path)) == [f"ok    CANN: {tmp_path}, version 9.1.0"]


@pytest.mark.parametrize(
    ("torch", "torch_npu", "cann", "line"),
    [
        ("2.10.0+cpu", "2.10.0.post4", "9.1.0", "ok    versions: torch 2.10.0 and torch_npu 2.10.0.post4"),
        ("2.10.0+cpu", "2.10.0.post4", "9.1.RC1", "ok    versions: torch 2.10.0 and torch_npu 2.10.0.post4"),
        ("2.10.0", "2.9.0.post6", "9.1.0", "FAIL  versions: torch 2.10.0 and torch_npu 2.9.0.post6 are not of one"),
        ("2.10.0", "2.10.1", "9.1.0", "FAIL  versions: torch 2.10.0 and torch_npu 2.10.1 are not of one release"),
        (
            "2.10.0",
            "2.10.0.post4",
            "9.0.RC1",
            "FAIL  versions: torch 2.10.0 and torch_npu 2.10.0.post4 are made for CANN 9.1.0, and 9.0.RC1 is older",
        ),
        (
            "2.10.0",
            "2.10.0.post4",
            "9.2.0",
            "note  versions: torch 2.10.0 and torch_npu 2.10.0.post4 are made for CANN 9.1.0; 9.2.0 is newer",
        ),
        ("2.12.0", "2.12.0", None, "note  versions: torch 2.12.0 and torch_npu 2.12.0 are made for CANN 9.1.0"),
        ("2.10.0", "2.10.0.post7", "9.1.0", "ok    versions: torch 2.10.0 and torch_npu 2.10.0.post7"),
        ("2.9.0", "2.9.0.post4", "9.0.0", "ok    versions: torch 2.9.0 and torch_npu 2.9.0.post4"),
        (
            "2.12.0",
            "2.12.0.post3",
            "9.0.0",
            "FAIL  versions: torch 2.12.0 and torch_npu 2.12.0.post3 are made for CANN 9.1",
        ),
        ("2.10.0", "2.10.0", "9.1.0", "note  versions: torch 2.10.0 and torch_npu 2.10.0: not known which CANN"),
        ("2.13.0", "2.13.0", "9.1.0", "note  versions: torch 2.13.0 and torch_npu 2.13.0: not known which CANN"),
        ("2.13.0", "2.13.0", "8.3.RC1", "FAIL  versions: CANN 8.3.RC1 is too old: it must be 9.0 or newer"),
    ],
)
def test_versions(torch: str, torch_npu: str, cann: str | None, line: str):
    installed = {"lopa-dist-ascend": "0.1.0", "torch": torch, "torch_npu": torch_npu}
    (found,) = lines_of(check_versions(installed, cann, "npugraph_ex"))
    assert found.startswith(line)


@pytest.mark.parametrize("mode", ["eager", "npugraph_ex", "ge"])
@pytest.mark.parametrize("version", ["2.8.0", "2.9.0", "2.9.0.post2", "2.9.1", "2.10.0", "2.11.0", "2.13.0"])
def test_torch_npu_is_taken_exactly_if_the_backend_takes_it(version: str, mode: str):
    installed = {"lopa-dist-ascend": "0.1.0", "torch": version.partition(".post")[0], "torch_npu": version}
    (found,) = lines_of(check_versions(installed, None, mode))
    assert found.startswith("FAIL") != can_run(version, mode)


INSTALL_INFO = """\
UserName=HwHiAiUser
UserGroup=HwHiAiUser
Driver_Install_Type=full
Driver_Install_Path_Param={folder}
Driver_Install_For_All=yes
Driver_Install_Mode=normal
Firmware_Install_Type=full
Firmware_Install_Path_Param={folder}
"""
"""/etc/ascend_install.info of a server, as its operators publish it."""
VERSION_INFO = """\
Version={version}
ascendhal_version=7.35.23
aicpu_version=1.0
tdt_version=1.0
log_version=1.0
prof_version=2.0
dvppkernels_version=1.1
tsfw_version=1.0
Innerversion=V100R001C21SPC002B220
compatible_version=[V100R001C17],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21]
compatible_version_fw=[7.0.0,7.7.99]
package_version={version}
"""
"""driver/version.info of an Atlas 800I server, likewise; there the version was 25.0.rc1.1."""


@pytest.mark.parametrize(
    ("version", "mode", "line"),
    [
        (
            "24.1.rc3.7",
            "npugraph_ex",
            "FAIL  driver: driver 24.1.rc3.7 cannot change tasks of captured graphs, as graph",
        ),
        ("24.1.rc3.7", "eager", "ok    driver: version 24.1.rc3.7"),
        ("24.1.rc3.7", "ge", "ok    driver: version 24.1.rc3.7"),
        ("25.0.T1", "npugraph_ex", "FAIL  driver: driver 25.0.T1 cannot"),
        (
            "25.0.rc1.1",
            "npugraph_ex",
            "note  driver: version 25.0.rc1.1; if a capture ends with 'Alloc sq cq fail', inst",
        ),
        ("25.2.1", "npugraph_ex", "note  driver: version 25.2.1; if a capture ends with 'Alloc sq cq fail', install"),
        ("25.5.0", "npugraph_ex", "note  driver: version 25.5.0; if a capture"),
        ("25.5.1", "npugraph_ex", "ok    driver: version 25.5.1"),
        ("25.5.2", "npugraph_ex", "ok    driver: version 25.5.2"),
        ("26.0.rc1", "npugraph_ex", "ok    driver: version 26.0.rc1"),
        ("trunk", "npugraph_ex", "FAIL  driver: 'trunk' is not a version of the driver; expected one such as 25.5.1"),
    ],
)
def test_driver(tmp_path: Path, version: str, mode: str, line: str):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/version.info").write_text(VERSION_INFO.format(version=version))
    install_info = tmp_path / "ascend_install.info"
    install_info.write_text(INSTALL_INFO.format(folder=tmp_path))
    (found,) = lines_of(check_driver(install_info, mode))
    assert found.startswith(line)


def test_a_driver_that_no_file_tells(tmp_path: Path):
    install_info = tmp_path / "ascend_install.info"
    install_info.write_text(INSTALL_INFO.format(folder=tmp_path))
    (found,) = lines_of(check_driver(install_info, "npugraph_ex"))
    assert found.startswith("note  driver: version unknown, and 25.0.RC1 or newer is needed; npu-smi info shows it")


NO_EXPANDABLE_PINNED = "without pin_memory_expandable_segments:True"


@pytest.mark.parametrize(
    ("environment", "in_graphs", "eager"),
    [
        ({}, "ok    environment: no variable is in the way of graph mode npugraph_ex", "ok"),
        (
            {"TASK_QUEUE_ENABLE": "2"},
            "FAIL  environment: TASK_QUEUE_ENABLE is '2', with which torch_npu refuses to capture graphs; "
            "set TASK_QUEUE_ENABLE=1",
            "ok",
        ),
        ({"TASK_QUEUE_ENABLE": "1"}, "ok", "ok"),
        (
            {"TASK_QUEUE_ENABLE": "3"},
            "FAIL  environment: TASK_QUEUE_ENABLE is '3', and torch_npu knows 0, 1 and",
            "FAIL",
        ),
        ({"TASK_QUEUE_ENABLE": "0"}, "note  environment: TASK_QUEUE_ENABLE is '0', with which every launch", "note"),
        (
            {"ASCEND_LAUNCH_BLOCKING": "1"},
            "FAIL  environment: ASCEND_LAUNCH_BLOCKING is '1', which makes the host wait for every kernel: that cannot "
            "be captured; set ASCEND_LAUNCH_BLOCKING=0, or serve with --graph-mode eager",
            "note  environment: ASCEND_LAUNCH_BLOCKING is '1', with which every launch takes longer; 0 is for serving",
        ),
        ({"ASCEND_LAUNCH_BLOCKING": "0"}, "ok", "ok"),
        ({"ASCEND_LAUNCH_BLOCKING": ""}, "ok", "ok"),
        ({"HCCL_DETERMINISTIC": "False"}, "ok", "ok"),
        (
            {"HCCL_DETERMINISTIC": "strict"},
            "note  environment: HCCL_DETERMINISTIC is 'strict', with which HCCL sums more than 512 KiB of up to 8 "
            "ranks on the device's CPU; see --deterministic",
            "note",
        ),
        ({"HCCL_OP_RETRY_ENABLE": "L0:0, L1:0"}, "ok", "ok"),
        ({"HCCL_OP_RETRY_ENABLE": "L1:1"}, "note  environment: HCCL_OP_RETRY_ENABLE is 'L1:1', with", "note"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, "note  environment: HCCL_HOST_SOCKET_PORT_RANGE is 'auto'", "note"),
        ({"RANK_TABLE_FILE": "/etc/ranks"}, "note  environment: RANK_TABLE_FILE is '/etc/ranks', by which", "note"),
        ({"RANK_TABLE_FILE": ""}, "ok", "ok"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "ok", "ok"),
        (
            {"PYTORCH_NPU_ALLOC_CONF": "page_size:1g, pin_memory_expandable_segments:True"},
            "FAIL  environment: PYTORCH_NPU_ALLOC_CONF is 'page_size:1g, pin_memory_expandable_segments:True', "
            f"whose pinned memory torch_npu refuses to capture; set PYTORCH_NPU_ALLOC_CONF {NO_EXPANDABLE_PINNED}",
            "ok",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pin_memory_expandable_segments:True"},
            "FAIL  environment: PYTORCH_ALLOC_CONF is 'pin_memory_expandable_segments:True', whose pinned memory",
            "ok",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pin_memory_expandable_segments:True,pin_memory_expandable_segments:False"},
            "ok",
            "ok",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            "FAIL  environment: PYTORCH_ALLOC_CONF is '', and PYTORCH_NPU_ALLOC_CONF is set too, which torch_npu "
            "refuses; unset one of the two, e.g. PYTORCH_ALLOC_CONF",
            "FAIL",
        ),
    ],
)
def test_environment(environment: dict[str, str], in_graphs: str, eager: str):
    for mode, line in (("npugraph_ex", in_graphs), ("eager", eager)):
        (found,) = lines_of(check_environment(environment, mode))
        assert found.startswith(line)


@pytest.mark.parametrize(
    ("setting", "usable", "line"),
    [
        ("1", 320, "ok    CPU affinity: 320 of 320 cores are usable"),
        (
            "1",
            20,
            "note  CPU affinity: 20 of 320 cores are usable, so torch_npu binds no thread; set CPU_AFFINITY_CONF=1,",
        ),
        ("1", 20, "note  CPU affinity: 20 of 320 cores are usable, so torch_npu binds no thread"),
        ("mode:2", 20, "note  CPU affinity: 20 of 320 cores are usable, so torch_npu binds no thread"),
        ("0", 20, "ok    CPU affinity: 20 of 320"),
        ("1,force:1,npu0:0-9", 20, "ok"),
        ("2", 320, "ok"),
        ("1,npu_affine:1", 320, "ok"),
        ("yes", 320, "note  CPU affinity: CPU_AFFINITY_CONF is 'yes', which torch_npu does not know; begin it with 0"),
    ],
)
def test_affinity(setting: str, usable: int, line: str):
    (found,) = lines_of(check_affinity(setting, usable, 320))
    assert found.startswith(line)


def test_the_affinity_that_is_checked_is_that_of_the_ranks():
    """As the launch scripts set it, which tests/unit/test_launch.py looks at."""
    assert affinity_of(NODE, {}) == "1"
    assert affinity_of(replace(NODE, bp=8, nnodes=2), {}) == "1"
    assert affinity_of(replace(NODE, bp=1), {}) == "0"
    assert affinity_of(replace(NODE, bp=1), {"CPU_AFFINITY_CONF": "2"}) == "2"


def test_missing_distributions():
    (found,) = lines_of(check_versions({"torch": "2.10.0"}, "9.1.0", "eager"))
    assert found.startswith(f"FAIL  versions: {sys.executable} has no lopa-dist-ascend and no torch_npu; install there")


def test_a_checkout_is_no_installation(tmp_path: Path):
    for name in ("site/torch_npu-2.10.0.post4", "checkout/lopa_dist_ascend-0.1.0", "checkout/torch-2.10.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir(parents=True)
        distribution, _, version = folder.stem.partition("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    path, checkout = [str(tmp_path / "checkout"), str(tmp_path / "site")], tmp_path / "checkout"
    assert installed_versions(path, checkout) == {"torch_npu": "2.10.0.post4"}
    assert installed_versions(path, tmp_path).keys() == {"lopa-dist-ascend", "torch", "torch_npu"}


def test_ports(tmp_path: Path):
    free = free_ports(4)
    launch = Launch(device="cpu", tp=1, bp=1, port=free, master_port=free + 2)
    free_lines = [f"127.0.0.1:{free}", f"127.0.0.1:{free + 2}"]
    assert lines_of(check_network(launch, tmp_path)) == [f"ok    network: {port} is free" for port in free_lines]
    last = replace(launch, port=65535, master_port=None)
    (line,) = lines_of(check_network(last, tmp_path))
    assert re.findall(r"127\.0\.0\.1:\d+", line) == ["127.0.0.1:65535"]
    with listening() as port:
        busy = replace(launch, master_port=port)
        remedy = "(Address already in use); stop the program that uses it, or choose another --master-port"
        assert f"FAIL  network: cannot listen on 127.0.0.1:{port} {remedy}" in lines_of(check_network(busy, tmp_path))
        other_node = replace(busy, nnodes=2, node_rank=1)
        assert lines_of(check_network(other_node, tmp_path)) == []
    (not_ours,) = lines_of(check_network(replace(launch, host="192.0.2.1"), tmp_path))[:1]
    assert not_ours.startswith(f"FAIL  network: cannot listen on 192.0.2.1:{free} (")


def test_the_checks_need_no_installed_package():
    """The launch scripts run them by the machine's own interpreter, before there is an environment (-S is without)."""
    command = [sys.executable, "-S", "-m", "scripts.launch", *"--device cpu --tp 2 --bp 2".split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert f"ok    model: {DEMO_MODEL}" in done.stdout.splitlines()


def test_the_checks_bring_no_torch():
    code = (
        "import runpy, sys\n"
        "main = runpy.run_module('scripts.launch.__main__')['main']\n"
        "sys.argv[1:] = ['--device', 'npu', '--tp', '1', '--bp', '1', '--port', '1']\n"
        "main()\n"
        "print([name for name in ('torch', 'torch_npu') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
