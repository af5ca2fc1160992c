"""What is to be launched, the findings of the checks, and the check of a launch's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lopa_ascend.demo import DEMO_MODEL

LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched: one server or several replicas on one node, or one server on several nodes.

    Every field is a flag of the launch scripts, or one of the server that they start.
    """

    device: str
    """"npu" or "cpu"."""
    tp: int
    """Tensor parallel size: ranks that split each forward pass."""
    bp: int
    """Branch parallel size: groups of ``tp`` ranks that take different branches."""
    model: Path = DEMO_MODEL
    """Hugging Face directory of a Dream or of a registered model."""
    lora_path: Path | None = None
    """Directory of a PEFT LoRA adapter."""
    host: str = "127.0.0.1"
    """Address of the HTTP server."""
    port: int = 8000
    """Port of the HTTP server; of replica 0 if there are several."""
    master_addr: str = "127.0.0.1"
    """Address of node 0."""
    master_port: int = 29500
    """Port on which the ranks find each other; of replica 0 if there are several."""
    interface: str | None = None
    """This node's interface on the network between the nodes."""
    timeout: int = 60
    """Seconds for which a rank may hang before all ranks end."""
    max_restarts: int = 3
    """How often torchrun starts all ranks again."""
    replicas: int = 1
    """Independent servers on this node."""
    nnodes: int = 1
    """Nodes of the server."""
    node_rank: int = 0
    """This node, from 0."""
    graph_mode: str = "npugraph_ex"
    """Graph mode of an NPU server, as the server's own flag ``--graph-mode`` says."""

    @property
    def local_ranks(self) -> int:
        """Ranks on this node, of all replicas."""
        return self.tp * self.bp * self.replicas // self.nnodes

    @property
    def http_ports(self) -> range:
        """Ports on which this node will serve HTTP."""
        return self._ports_from(self.port)

    @property
    def master_ports(self) -> range:
        """Ports of this node on which ranks will find each other."""
        return self._ports_from(self.master_port)

    def _ports_from(self, first: int) -> range:
        """One port for each replica; none on nodes other than node 0."""
        count = self.replicas if self.node_rank == 0 else 0
        return range(first, min(first + count, LAST_PORT + 1))


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: str
    """"ok", "note" (the launch may well work) or "FAIL" (it cannot)."""
    text: str
    """What was looked at: what was found."""

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    return Finding("note", text)


def fail(what: str, remedy: str) -> Finding:
    """A failure: what is wrong, and what to do."""
    return Finding("FAIL", f"{what}; {remedy}")


def check_arguments(launch: Launch) -> Iterator[Finding]:
    """Checks what needs no look at the machine."""
    num_ranks, nodes = launch.tp * launch.bp, launch.nnodes
    mesh = f"mesh: tp {launch.tp} x bp {launch.bp} = {num_ranks} ranks"
    if launch.bp % nodes:
        yield fail(f"{mesh} on {nodes} nodes would cut a TP group in two", f"choose --bp as a multiple of {nodes}")
    else:
        on_each_node = f", {num_ranks // nodes} on each of {nodes} nodes" if nodes > 1 else ""
        times = f", {launch.replicas} times" if launch.replicas > 1 else ""
        yield ok(mesh + on_each_node + times)
    if launch.node_rank >= nodes:
        yield fail(f"mesh: --node-rank {launch.node_rank} of {nodes} nodes", f"choose one from 0 to {nodes - 1}")
    if set(launch.http_ports) & set(launch.master_ports):
        yield fail(f"ports: --port {launch.port} and --master-port {launch.master_port} overlap", "change one of them")
    if max(launch.port, launch.master_port) + launch.replicas - 1 > LAST_PORT:
        yield fail(f"ports: {launch.replicas} replicas go beyond port {LAST_PORT}", "lower --port or --master-port")
