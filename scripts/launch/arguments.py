"""What is to be launched: the flags of the launch scripts, how they are parsed, and which go together."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from lopa_ascend.config import GRAPH_MODES_BY_DEVICE
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from scripts.launch.findings import Finding, fail, ok

LAST_PORT = 65535
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


def device(text: str) -> str:
    """Parses where the model is to run."""
    if text not in ("npu", "cpu"):
        raise argparse.ArgumentTypeError(f"must be npu or cpu, got {text!r}")
    return text


def flag(parse: Callable[[str], object], metavar: str, text: str, default: Any = MISSING) -> Any:
    """A field of Launch that is a flag of its name: how it is parsed, what its value is called, and its help."""
    return field(default=default, metadata={"type": parse, "metavar": metavar, "help": text})


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched: one server, on one node or several.

    Every field is a flag of the launch scripts, or one of the server that they start.
    """

    device: str = flag(device, "npu|cpu", "what the model is to run on")
    tp: int = flag(integer(1, 4096), "N", "tensor parallel size: ranks that split each forward pass")
    bp: int = flag(integer(1, 4096), "N", "branch parallel size: groups of --tp ranks that take different branches")
    model: Path = flag(Path, "MODEL", "directory, or name on the hub, of a Dream or of a registered model", DEMO_MODEL)
    lora_path: Path | None = flag(Path, "ADAPTER", "directory, or name on the hub, of a PEFT LoRA adapter", None)
    host: str = flag(str, "ADDRESS", "address of the HTTP server", "127.0.0.1")
    port: int = flag(integer(1, LAST_PORT), "N", "port of the HTTP server", 8000)
    master_addr: str = flag(str, "HOST", "address of node 0", "127.0.0.1")
    master_port: int | None = flag(
        integer(1, LAST_PORT), "N", "port of node 0 on which the ranks of several nodes find each other", None
    )
    interface: str | None = flag(str, "NAME", "this node's interface on the network between the nodes", None)
    timeout: int = flag(timeout, "SECONDS", "how long a rank may hang before all end (HCCL with AIV: at most 1091)", 60)
    max_restarts: int = flag(integer(0, 10**6), "N", "how often a server is started again after it has failed", 3)
    nnodes: int = flag(integer(1, 4096), "N", "nodes of the server", 1)
    node_rank: int = flag(integer(0, 4095), "N", "this node, from 0", 0)
    graph_mode: str = flag(
        graph_mode, "MODE", "graph mode of an NPU server; after -- for the launch scripts", "npugraph_ex"
    )

    @property
    def local_ranks(self) -> int:
        """Ranks on this node."""
        return self.tp * self.bp // self.nnodes

    @property
    def http_ports(self) -> list[int]:
        """The port on which this node will serve HTTP, if it is node 0."""
        return [self.port] if self.node_rank == 0 else []

    @property
    def master_ports(self) -> list[int]:
        """The port of this node on which ranks will find each other, if there is one."""
        return [self.master_port] if self.master_port is not None and self.node_rank == 0 else []


def parse_args(description: str, argv: list[str] | None = None) -> tuple[Launch, bool]:
    """The launch, and whether only its arguments are to be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.launch",
        usage="%(prog)s --device {npu,cpu} --tp N --bp N [FLAGS OF A LAUNCH SCRIPT]",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arguments-only", action="store_true", help="check the arguments, without a look at the machine"
    )
    for option in fields(Launch):
        given, default = dict(option.metadata), option.default
        if default not in (MISSING, None):
            given["help"] += " (default: the bundled one)" if default == DEMO_MODEL else f" (default: {default})"
        parser.add_argument(f"--{option.name.replace('_', '-')}", required=default is MISSING, **given)
    values = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    arguments_only = values.pop("arguments_only")
    return Launch(**values), arguments_only


def check_arguments(launch: Launch) -> Iterator[Finding]:
    """Checks what needs no look at the machine."""
    num_ranks, nodes = launch.tp * launch.bp, launch.nnodes
    mesh = f"mesh: tp {launch.tp} x bp {launch.bp} = {num_ranks} ranks"
    if launch.bp % nodes:
        yield fail(f"{mesh} on {nodes} nodes would cut a TP group in two", f"choose --bp as a multiple of {nodes}")
    else:
        on_each_node = f", {num_ranks // nodes} on each of {nodes} nodes" if nodes > 1 else ""
        yield ok(mesh + on_each_node)
    if launch.node_rank >= nodes:
        yield fail(f"mesh: --node-rank {launch.node_rank} of {nodes} nodes", f"choose one from 0 to {nodes - 1}")
    if launch.port == launch.master_port:
        yield fail(f"ports: --port and --master-port are both {launch.port}", "change one of them")
