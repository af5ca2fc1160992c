"""What must hold before a launch, one line each; exit status 1 if anything does not. The launch scripts run it first.

python scripts/preflight.py --device npu --tp 4 --bp 4 --model DIR        by itself: is this machine ready?
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from lopa_ascend.config import ConfigError, ModelConfig, npu_versions
from lopa_ascend.config.files import read_json_object
from lopa_ascend.demo import DEMO_MODEL

DISTRIBUTIONS = ("lopa-dist-ascend", "torch", "torch_npu")
LIBRARIES = ("libascendcl.so", "libhccl.so")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
LAST_PORT = 65535
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched, by the flags of the launch scripts: servers on one node, or one on several nodes."""

    device: str
    tp: int
    bp: int
    model: Path = DEMO_MODEL
    lora_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    interface: str | None = None
    timeout: int = 60
    max_restarts: int = 3
    replicas: int = 1
    nnodes: int = 1
    node_rank: int = 0

    @property
    def local_ranks(self) -> int:
        """Ranks on this node, of all replicas."""
        return self.tp * self.bp * self.replicas // self.nnodes

    @property
    def listening(self) -> dict[str, tuple[str, range]]:
        """Address ("" for every one) and ports that this node will listen on, by the flag that sets the first port."""
        count = self.replicas if self.node_rank == 0 else 0
        return {
            "--port": (self.host, range(self.port, min(self.port + count, LAST_PORT + 1))),
            "--master-port": ("", range(self.master_port, min(self.master_port + count, LAST_PORT + 1))),
        }


@dataclass(frozen=True)
class Finding:
    """A line of the report. ``verdict``: "ok", "note" (it may well run) or "FAIL" (it cannot)."""

    verdict: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    return Finding("note", text)


def fail(what: str, remedy: str) -> Finding:
    return Finding("FAIL", f"{what}; {remedy}")


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(launch: Launch) -> Iterator[Finding]:
    """What can be said without a look at the machine."""
    world, nodes = launch.tp * launch.bp, launch.nnodes
    mesh = f"mesh: tp {launch.tp} x bp {launch.bp} = {world} ranks"
    if launch.bp % nodes:
        yield fail(f"{mesh} on {nodes} nodes would cut a TP group in two", f"choose --bp as a multiple of {nodes}")
    else:
        each = f", {world // nodes} on each of {nodes} nodes" if nodes > 1 else ""
        yield ok(mesh + each + (f", {launch.replicas} times" if launch.replicas > 1 else ""))
    if launch.node_rank >= nodes:
        yield fail(f"mesh: --node-rank {launch.node_rank} of {nodes} nodes", f"choose one from 0 to {nodes - 1}")
    (_, http), (_, master) = launch.listening.values()
    if set(http) & set(master):
        yield fail(f"ports: --port {launch.port} and --master-port {launch.master_port} meet", "move one of them")
    if max(launch.port, launch.master_port) + launch.replicas - 1 > LAST_PORT:
        yield fail(f"ports: {launch.replicas} replicas go beyond port {LAST_PORT}", "lower --port or --master-port")


# ---- NPUs and their software -----------------------------------------------------------------------------------------


def check_devices(launch: Launch, dev: Path, visible: str | None) -> Iterator[Finding]:
    """Whether ``dev`` (/dev) has the dies that ``visible`` (ASCEND_RT_VISIBLE_DEVICES) names, or else enough of them.

    A container counts its dies from 0, whichever davinciN are mapped into it: their number decides, not their names.
    """
    present = sum(1 for entry in dev.glob("davinci*") if re.fullmatch(r"davinci\d+", entry.name))
    needed = launch.local_ranks
    if not present:
        yield fail(f"devices: {dev} has no davinciN", "install the driver, or start the container with its devices")
        return
    if visible is not None and not re.fullmatch(r"\d+(,\d+)*", visible):
        yield fail(f"devices: {VISIBLE} is {visible!r}", "give numbers and commas alone, e.g. 0,1,2,3")
        return
    dies = list(range(needed)) if visible is None else [int(die) for die in visible.split(",")]
    if len(dies) < needed:
        yield fail(f"devices: {VISIBLE} names {len(dies)} dies for {needed} ranks", "name more, or lower --bp")
    elif dies != sorted(set(dies)):
        yield fail(f"devices: {VISIBLE} is {visible}, but CANN takes ascending numbers", "sort them, each one once")
    elif dies[-1] >= present:
        named = f"{needed} ranks on as many dies" if visible is None else f"{VISIBLE} names die {dies[-1]}"
        remedy = "lower --bp" if visible is None else f"name dies from 0 to {present - 1}"
        yield fail(f"devices: {named}, but {dev} has {present}", remedy)
    else:
        yield ok(f"devices: dies {', '.join(map(str, dies[:needed]))} of {present}")
        yield from _check_packages(launch.tp, dies[:needed])


def _check_packages(tp: int, dies: list[int]) -> Iterator[Finding]:
    """Dies 2i and 2i + 1 are one package, with the fastest link: ranks 2j and 2j + 1 of a TP group belong there."""
    pairs = zip(dies[::2], dies[1::2], strict=False)
    apart = [f"{a} and {b}" for a, b in pairs if a // 2 != b // 2]
    if tp % 2 == 0 and apart:
        yield note(f"devices: neighbours in a TP group that are on different packages: {', '.join(apart)}")


def check_cann(home: Path | None) -> Iterator[Finding]:
    """Whether CANN's set_env.sh was sourced; ``home`` is ASCEND_HOME_PATH."""
    remedy = "source CANN's set_env.sh, e.g. /usr/local/Ascend/cann/set_env.sh"
    if home is None:
        yield fail("CANN: ASCEND_HOME_PATH is not set", remedy)
    elif missing := [name for name in LIBRARIES if not (home / "lib64" / name).exists()]:
        yield fail(f"CANN: {home / 'lib64'} has no {' and no '.join(missing)}", remedy)
    else:
        yield ok(f"CANN: {home}, version {cann_version(home) or 'unknown'}")


def cann_version(home: Path) -> str | None:
    """What CANN's ascend_toolkit_install.info says; None without that file or a version in it."""
    for file in home.glob("*-linux/ascend_toolkit_install.info"):
        if match := re.search(r"^version=(\S+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
            return match[1]
    return None


def check_versions(installed: Mapping[str, str], cann: str | None) -> Iterator[Finding]:
    """Whether torch, torch_npu and CANN fit; ``installed``: versions of those ``DISTRIBUTIONS`` that are there."""
    if missing := [name for name in DISTRIBUTIONS if name not in installed]:
        remedy = f"install there what is missing (this project: pip install -e {ROOT}), or set PYTHON to another python"
        yield fail(f"versions: {sys.executable} has no {' and no '.join(missing)}", remedy)
        return
    torch, torch_npu = (installed[name].partition("+")[0] for name in ("torch", "torch_npu"))
    try:
        npu_versions.check_versions(torch, torch_npu, "eager")  # what every server runs, whatever its graph mode
        if cann is not None:
            npu_versions.check_cann(cann)
    except npu_versions.UnsupportedStackError as error:
        yield Finding("FAIL", f"versions: {error}")
        return
    pair = f"versions: torch {torch} and torch_npu {torch_npu}"
    made_for = npu_versions.CANN_OF_TORCH_NPU.get(torch_npu)
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
    """The versions of those ``DISTRIBUTIONS`` that are on the path ``path``; what lies in ``checkout`` does not count.

    Imports none of them: without CANN, torch_npu cannot be imported, and where it is installed torch imports it.
    """
    elsewhere = [entry for entry in path if Path(entry).resolve() != checkout]
    found = {name: next(iter(metadata.distributions(name=name, path=elsewhere)), None) for name in DISTRIBUTIONS}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}


# ---- network and model -----------------------------------------------------------------------------------------------


def check_network(launch: Launch, net: Path) -> Iterator[Finding]:
    """Whether ``net`` (/sys/class/net) has the interface, the master's name an address, and the ports are free."""
    if launch.interface is not None and not (net / launch.interface).exists():
        known = ", ".join(sorted(entry.name for entry in net.iterdir()))
        yield fail(f"network: there is no interface {launch.interface}", f"choose --interface from {known}")
    try:
        socket.getaddrinfo(launch.master_addr, None)
    except OSError as error:
        yield fail(f"network: --master-addr {launch.master_addr} ({error.strerror})", "give the address of node 0")
    for name, (host, ports) in launch.listening.items():
        for port in ports:
            address = f"{host}:{port}" if host else str(port)
            try:
                with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind((host, port))
            except OSError as error:
                yield fail(f"network: cannot listen on {address} ({error.strerror})", f"end what does, or move {name}")
            else:
                yield ok(f"network: {address} is free")


def check_model(launch: Launch) -> Iterator[Finding]:
    """Whether the model's and the adapter's files are there and can be read, and tp splits the model."""
    for check in (_check_files, _check_heads):
        try:
            yield from check(launch)
        except ConfigError as error:
            yield fail(f"model: {error}", "give a whole Hugging Face directory of a Dream model")


def _check_files(launch: Launch) -> Iterator[Finding]:
    index = launch.model / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        weight_map = read_json_object(index, ConfigError).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: has no weight_map")
        names = set(weight_map.values())
    files = [launch.model / name for name in sorted(names)]
    if launch.lora_path is not None:
        files += [launch.lora_path / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    unreadable = [file for file in files if not os.access(file, os.R_OK)]
    for file in unreadable:
        yield fail(f"model: {file} is not there or cannot be read", "finish its download, or let this user read it")
    if not unreadable:
        yield ok(f"model: {launch.model}")


def _check_heads(launch: Launch) -> Iterator[Finding]:
    file = launch.model / "config.json"
    config = ModelConfig.from_json(read_json_object(file, ConfigError), {}, str(file))
    sizes, heads = config.tensor_parallel_sizes(), f"{config.num_heads} query and {config.num_kv_heads} KV heads"
    if launch.tp in sizes:
        yield ok(f"model: tp {launch.tp} splits {heads}")
    else:
        remedy = f"choose --tp from {', '.join(map(str, sizes))}"
        yield fail(f"model: tp {launch.tp} does not split a model with {heads}", remedy)


# ---- command line ----------------------------------------------------------------------------------------------------


def check_machine(launch: Launch) -> Iterator[Finding]:
    """All that needs a look at this machine."""
    if launch.device == "npu":
        home = Path(os.environ["ASCEND_HOME_PATH"]) if os.environ.get("ASCEND_HOME_PATH") else None
        yield from check_devices(launch, Path("/dev"), os.environ.get(VISIBLE))
        yield from check_cann(home)
        yield from check_versions(installed_versions(sys.path, ROOT), None if home is None else cann_version(home))
    yield from check_network(launch, Path("/sys/class/net"))
    yield from check_model(launch)


def number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # As a shell reads it too: no sign, no blank, no leading zero.
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, got {text!r}")
        return int(text)

    return parse


KINDS: dict[str, Callable[[str], object]] = {
    "model": Path,
    "lora_path": Path,
    "tp": number(1, 4096),
    "bp": number(1, 4096),
    "port": number(1, LAST_PORT),
    "master_port": number(1, LAST_PORT),
    "timeout": number(1, 1091),  # HCCL waits no longer
    "max_restarts": number(0, 10**6),
    "replicas": number(1, 256),
    "nnodes": number(1, 4096),
    "node_rank": number(0, 4095),
}
"""How the text of a flag becomes a value, where it does not stay text."""


def parse_args(argv: list[str] | None = None) -> tuple[Launch, bool]:
    """The launch, and whether only its arguments are to be checked."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --device {npu,cpu} [FLAGS OF A LAUNCH SCRIPT]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--arguments-only", action="store_true", help="look at the arguments, not at this machine")
    parser.add_argument("--device", choices=("npu", "cpu"), required=True)
    for name in (field.name for field in fields(Launch) if field.name != "device"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=KINDS.get(name, str), required=name in ("tp", "bp"))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    arguments_only = given.pop("arguments_only")
    return Launch(**given), arguments_only


def main() -> int:
    launch, arguments_only = parse_args()
    findings = [*check_arguments(launch), *(() if arguments_only else check_machine(launch))]
    print("\n".join(map(str, findings)), flush=True)
    return int(any(finding.verdict == "FAIL" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
