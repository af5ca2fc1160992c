"""Checks the NPUs of this machine, their software and their environment variables, without loading any of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from lopa_ascend.backend.device import Ask, ask
from lopa_ascend.backend.npu import environment as npu_environment
from lopa_ascend.backend.npu import health
from lopa_ascend.backend.npu import versions as npu_versions
from scripts.launch.arguments import Launch
from scripts.launch.findings import Finding, fail, note, ok

DISTRIBUTIONS = ("lopa-dist-ascend", "torch", "torch_npu")
"""Names of the distributions that must be installed."""
LIBRARIES = ("libascendcl.so", "libhccl.so")
"""Files that CANN must have in its lib64."""
CONTROL_DEVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")
"""Devices of the driver that every process with an NPU opens, whichever die it uses."""
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
AFFINITY = "CPU_AFFINITY_CONF"
NOTED_VARIABLES = {
    "HCCL_DETERMINISTIC": (
        "true|strict",
        "with which HCCL sums more than 512 KiB of up to 8 ranks on the device's CPU; see --deterministic",
    ),
    "HCCL_OP_RETRY_ENABLE": (".*:1.*", "with which HCCL sums nothing on the vector cores; unset it"),
    "HCCL_HOST_SOCKET_PORT_RANGE": (".+", "which HCCL takes in place of HCCL_IF_BASE_PORT: its ports are not checked"),
    "RANK_TABLE_FILE": (".+", "by which torch_npu may connect the ranks in another way; unset it"),
}
"""Variables of HCCL and torch_npu that change what a server does: for which values, in any case, and how."""
DIES = 16
"""Dies of a 910C node."""
ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""


def num_npus(dev: Path = Path("/dev")) -> int:
    """Dies that this machine, or this container, has."""
    return sum(1 for entry in dev.glob("davinci*") if re.fullmatch(r"davinci\d+", entry.name))


def check_devices(launch: Launch, dev: Path, visible: str | None) -> Iterator[Finding]:
    """Checks that the machine has the dies that the ranks of this node need, and the driver's control devices.

    A container counts its dies from 0, whichever davinciN are mapped into it: their number decides, not their names.

    Args:
        launch: what is to be launched.
        dev: /dev.
        visible: the value of ASCEND_RT_VISIBLE_DEVICES; None if it is not set.
    """
    num_present = num_npus(dev)
    num_needed = launch.local_ranks
    if not num_present:
        yield fail(f"devices: {dev} has no davinciN", "install the driver, or start the container with its devices")
        return
    if missing := [name for name in CONTROL_DEVICES if not (dev / name).exists()]:
        yield fail(
            f"devices: {dev} has no {' and no '.join(missing)}", "load the driver, or start the container with them"
        )
        return
    dies = _chosen_dies(launch, visible)
    if not dies:
        yield fail(f"devices: {VISIBLE} is {visible!r}", "give numbers and commas alone, e.g. 0,1,2,3")
    elif len(dies) < num_needed:
        yield fail(f"devices: {VISIBLE} names {len(dies)} dies for {num_needed} ranks", "name more, or lower --bp")
    elif dies != sorted(set(dies)):
        yield fail(f"devices: {VISIBLE} is {visible}, but CANN takes ascending numbers", "sort them, each one once")
    elif dies[-1] >= num_present:
        named = f"{num_needed} ranks on as many dies" if visible is None else f"{VISIBLE} names die {dies[-1]}"
        remedy = "lower --bp" if visible is None else f"name dies from 0 to {num_present - 1}"
        yield fail(f"devices: {named}, but {dev} has {num_present}", remedy)
    else:
        yield ok(f"devices: dies {', '.join(map(str, dies[:num_needed]))} of {num_present}")
        yield from _check_packages(launch.tp, dies[:num_needed])


def _chosen_dies(launch: Launch, visible: str | None) -> list[int]:
    """The dies that ``visible`` names, or else as many as the launch needs; none if it is malformed."""
    if visible is None:
        return list(range(launch.local_ranks))
    return [int(die) for die in visible.split(",")] if re.fullmatch(r"\d+(,\d+)*", visible) else []


def check_health(launch: Launch, visible: str | None, ask: Ask = ask) -> Iterator[Finding]:
    """Checks that the dies of the ranks are not broken, as far as the driver knows.

    Args:
        launch: what is to be launched.
        visible: the value of ASCEND_RT_VISIBLE_DEVICES; None if it is not set.
        ask: runs npu-smi and hccn_tool.
    """
    try:
        dies = health.read_dies(ask, with_links=launch.nnodes > 1)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield note(f"health: unknown ({error}); a container needs the host's /usr/local/bin/npu-smi")
        return
    chosen = [die for die in dies if die.index in _chosen_dies(launch, visible)[: launch.local_ranks]]
    findings = []
    for die in chosen:
        if die.fault is not None:
            findings.append(fail(f"health: die {die.index}: {die.fault}", _without_broken(launch, dies, die)))
        elif die.warning is not None:
            findings.append(note(f"health: die {die.index}: {die.warning}; after an error on it leave it out"))
        if die.link == "DOWN":
            needless = "nodes of one super-pod do without it"
            findings.append(note(f"health: die {die.index}: its RoCE link between nodes is down; {needless}"))
    hottest = max((die.temperature or 0 for die in chosen), default=0)
    yield from findings or [ok(f"health: no fault of {len(chosen)} dies, at most {hottest} C")]


def _without_broken(launch: Launch, dies: list[health.Die], broken: health.Die) -> str:
    """How to launch on other dies than those that are broken, if possible on whole packages."""
    good = [die.index for die in dies if die.fault is None]
    whole = [die for die in good if die ^ 1 in good]
    needed = launch.local_ranks
    chosen = whole if len(whole) >= needed else good
    lower = "" if len(good) >= needed else f"lower --bp, because {len(good)} dies are left, and "
    names = ",".join(map(str, chosen[:needed]))
    reset = f"npu-smi set -t reset -i {broken.npu} -c {broken.chip}"
    return f"{lower}set {VISIBLE}={names}, or reset it while nothing runs on this node ({reset})"


def check_npu_network(launch: Launch, settings: Path) -> Iterator[Finding]:
    """Notes what is not checked of the network between the NPUs of several nodes.

    Args:
        launch: what is to be launched.
        settings: /etc/hccn.conf, which has the addresses of this node's NPUs.
    """
    if launch.nnodes > 1:
        where = "" if settings.exists() else f", and {settings} is missing: a container needs the host's"
        yield note(f"NPU network: not tried{where}; docs/deploy.md, Several nodes, has the commands")


def _check_packages(tp: int, dies: list[int]) -> Iterator[Finding]:
    """Notes pairs of neighbouring ranks of a TP group that do not share a package.

    Dies 2i and 2i + 1 are one package, with the fastest link between them.

    Args:
        tp: tensor parallel size.
        dies: the die of each rank of this node.
    """
    pairs = zip(dies[::2], dies[1::2], strict=False)
    apart = [f"{a} and {b}" for a, b in pairs if a // 2 != b // 2]
    if tp % 2 == 0 and apart:
        yield note(f"devices: neighbours in a TP group that are on different packages: {', '.join(apart)}")


def check_cann(home: Path | None) -> Iterator[Finding]:
    """Checks that CANN's set_env.sh was sourced.

    Args:
        home: the value of ASCEND_HOME_PATH; None if it is not set.
    """
    remedy = "source CANN's set_env.sh, e.g. /usr/local/Ascend/cann/set_env.sh"
    if home is None:
        yield fail("CANN: ASCEND_HOME_PATH is not set", remedy)
    elif missing := [name for name in LIBRARIES if not (home / "lib64" / name).exists()]:
        yield fail(f"CANN: {home / 'lib64'} has no {' and no '.join(missing)}", remedy)
    else:
        yield ok(f"CANN: {home}, version {cann_version(home) or 'unknown'}")


def cann_version(home: Path) -> str | None:
    """The version in CANN's ascend_toolkit_install.info; None without that file or a version in it."""
    for file in home.glob("*-linux/ascend_toolkit_install.info"):
        if match := re.search(r"^version=(\S+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            return match[1]
    return None


def check_driver(install_info: Path, graph_mode: str) -> Iterator[Finding]:
    """Checks that the driver, and so the Ascend HDK that it is of, can run a graph mode.

    Args:
        install_info: see ``npu_versions.driver_version``.
        graph_mode: "eager", "npugraph_ex" or "ge".
    """
    driver = npu_versions.driver_version(install_info)
    if driver is None:
        remedy = "npu-smi info shows it; a container needs the host's /usr/local/Ascend/driver/version.info"
        yield note(f"driver: version unknown, and {npu_versions.OLDEST_DRIVER} or newer is needed; {remedy}")
        return
    try:
        npu_versions.check_driver(driver, graph_mode)
        is_old = npu_versions.driver_order(driver) < npu_versions.driver_order(npu_versions.ADVISED_DRIVER)
    except npu_versions.UnsupportedStackError as error:
        yield Finding("FAIL", f"driver: {error}")
        return
    if is_old and graph_mode in npu_versions.CAPTURING_MODES:
        advice = f"if a capture ends with 'Alloc sq cq fail', install Ascend HDK {npu_versions.ADVISED_DRIVER} or newer"
        yield note(f"driver: version {driver}; {advice}")
    else:
        yield ok(f"driver: version {driver}")


def check_environment(environment: Mapping[str, str], graph_mode: str) -> Iterator[Finding]:
    """Checks that no environment variable keeps a graph mode from running, or makes launches slow.

    Args:
        environment: variables and their values.
        graph_mode: "eager", "npugraph_ex" or "ge".
    """
    refusals = npu_environment.refusals(environment, graph_mode)
    findings = [Finding("FAIL", f"environment: {refusal}") for refusal in refusals]
    queue, blocking = (environment.get(name) for name in (npu_environment.TASK_QUEUE, npu_environment.BLOCKING))
    slow = "with which every launch takes longer"
    if queue is not None and npu_environment.number(queue) == 0:
        remedy = "1 is for serving, unless the self-test says 0"
        findings.append(note(f"environment: {npu_environment.TASK_QUEUE} is {queue!r}, {slow}; {remedy}"))
    if blocking and npu_environment.number(blocking) and graph_mode not in npu_versions.CAPTURING_MODES:
        findings.append(note(f"environment: {npu_environment.BLOCKING} is {blocking!r}, {slow}; 0 is for serving"))
    for name, (values, effect) in NOTED_VARIABLES.items():
        if re.fullmatch(values, value := environment.get(name, ""), re.IGNORECASE):
            findings.append(note(f"environment: {name} is {value!r}, {effect}"))
    yield from findings or [ok(f"environment: no variable is in the way of graph mode {graph_mode}")]


def affinity_of(launch: Launch, environment: Mapping[str, str]) -> str:
    """The value of CPU_AFFINITY_CONF with which the ranks will run: the user's, or what launch/common.sh then sets."""
    takes_the_node = launch.tp * launch.bp // launch.nnodes == DIES
    return environment.get(AFFINITY, "1" if takes_the_node else "0")


def check_affinity(setting: str, num_usable: int, num_cores: int) -> Iterator[Finding]:
    """Notes where torch_npu will not bind its threads to cores as the environment asks it to.

    It gives each visible die an equal share of all cores, and binds nothing if this process may not use one of them.

    Args:
        setting: the value of CPU_AFFINITY_CONF.
        num_usable: cores that this process may use.
        num_cores: cores of the machine.
    """
    mode, *options = setting.removeprefix("mode:").split(",")
    if setting and mode not in ("0", "1", "2"):
        choices = "0 (none), 1 (a share of the cores for each die) or 2 (a core for each busy thread)"
        yield note(f"CPU affinity: {AFFINITY} is {setting!r}, which torch_npu does not know; begin it with {choices}")
    elif mode != "0" and num_usable < num_cores and not any(re.match(r"force:1|npu", option) for option in options):
        remedy = f"set {AFFINITY}=1,force:1 with a range for each die (npu0:0-9,...), or {AFFINITY}=0"
        yield note(
            f"CPU affinity: {num_usable} of {num_cores} cores are usable, so torch_npu binds no thread; {remedy}"
        )
    else:
        yield ok(f"CPU affinity: {num_usable} of {num_cores} cores are usable")


def check_versions(installed: Mapping[str, str], cann: str | None, graph_mode: str) -> Iterator[Finding]:
    """Checks that torch, torch_npu and CANN go together and can run a graph mode of the NPU backend.

    Args:
        installed: versions of those ``DISTRIBUTIONS`` that are installed.
        cann: version of CANN; None if it is unknown.
        graph_mode: "eager", "npugraph_ex" or "ge".
    """
    if missing := [name for name in DISTRIBUTIONS if name not in installed]:
        # Without the other two in place, pip would choose a torch_npu by itself, and replace torch.
        project = shlex.quote(f"{ROOT}[npu]")
        remedy = (
            f"install there torch and torch_npu, of one release, and only then this project (pip install -e {project})"
        )
        yield fail(
            f"versions: {sys.executable} has no {' and no '.join(missing)}",
            f"{remedy}, or set PYTHON to another python",
        )
        return
    torch, torch_npu = (installed[name].partition("+")[0] for name in ("torch", "torch_npu"))
    try:
        npu_versions.check_versions(torch, torch_npu, graph_mode)
        if cann is not None:
            npu_versions.check_cann(cann)
    except npu_versions.UnsupportedStackError as error:
        yield Finding("FAIL", f"versions: {error}")
        return
    pair = f"versions: torch {torch} and torch_npu {torch_npu}"
    made_for = npu_versions.cann_of(torch_npu)
    if made_for is None:
        yield note(f"{pair}: not known which CANN they are made for")
    elif cann is None:
        yield note(f"{pair} are made for CANN {made_for}")
    elif _major_and_minor(cann) < _major_and_minor(made_for):
        yield fail(f"{pair} are made for CANN {made_for}, and {cann} is older", f"install CANN {made_for}")
    elif _major_and_minor(cann) > _major_and_minor(made_for):
        yield note(f"{pair} are made for CANN {made_for}; {cann} is newer")
    else:
        yield ok(pair)


def _major_and_minor(cann: str) -> tuple[int, ...]:
    """The first two numbers of a version of CANN: patches and release candidates do not matter."""
    return npu_versions.release_of(cann)[:2]


def installed_versions(path: Sequence[str], checkout: Path) -> dict[str, str]:
    """The versions of those ``DISTRIBUTIONS`` that are installed.

    Imports none of them: without CANN, torch_npu cannot be imported, and where it is installed torch imports it.

    Args:
        path: where to look, as in ``sys.path``.
        checkout: a folder that does not count as an installation.
    """
    elsewhere = [entry for entry in path if Path(entry).resolve() != checkout]
    found = {name: next(iter(metadata.distributions(name=name, path=elsewhere)), None) for name in DISTRIBUTIONS}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}
