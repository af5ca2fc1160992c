"""How ranks find each other, and how those on this machine start and end. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lopa_ascend.config import EngineConfig, ParameterError

if TYPE_CHECKING:
    import subprocess

OTHER_RANK_FAILED = 3
"""Exit status of a rank that ended because another rank had failed."""
_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h: the signal that a process gets when its parent ends."""
LOCALHOST = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


# ---- where the ranks meet --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendezvous:
    """Where one rank meets the others, in the terms of torchrun."""

    rank: int
    world_size: int
    host: str
    """Address of the store through which the ranks find each other; ``port`` is its TCP port."""
    port: int
    local: bool

    @classmethod
    def on_this_machine(cls, rank: int, world_size: int, port: int) -> Rendezvous:
        return cls(rank, world_size, LOCALHOST, port, local=True)

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE, which torchrun sets. ParameterError if
        one is missing or malformed."""
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
        except KeyError as error:
            message = (
                f"RANK or WORLD_SIZE is set, so this process is one of several ranks; but {error.args[0]} is missing"
            )
            raise ParameterError("tensor_parallel_size", message) from error
        except ValueError as error:
            message = f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_PORT must be numbers where they are set: {error}"
            raise ParameterError("tensor_parallel_size", message) from error
        if not 0 <= rank < world_size:
            message = f"RANK is {rank}, expected 0 to {world_size - 1}, because WORLD_SIZE is {world_size}"
            raise ParameterError("tensor_parallel_size", message)
        return cls(rank, world_size, host, port, local)

    def check_world_size(self, config: EngineConfig) -> None:
        """Raises ParameterError, with the sizes that would fit, if not as many ranks were started as ``config`` asks
        for."""
        if self.world_size != config.world_size:
            tp, bp = config.tensor_parallel_size, config.branch_parallel_size
            raise ParameterError(
                "branch_parallel_size",
                f"tensor_parallel_size {tp} x branch_parallel_size {bp} are {tp * bp} ranks, but {self.world_size} "
                f"were started; {_sizes_that_fit(self.world_size, tp)}",
            )

    def check_host(self) -> None:
        """Refuses, on rank 0, a MASTER_ADDR on the loopback interface if other machines must reach it (ParameterError).

        Many systems give their own name such an address. Rank 0 listens on the address of ``host`` alone.
        """
        if self.local or self.rank or self.host in (LOCALHOST, "::1", "localhost"):
            return
        try:
            address = str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return  # listening there will say so
        if ip_address(address).is_loopback:
            raise ParameterError(
                "tensor_parallel_size",
                f"MASTER_ADDR is {self.host}, which is {address} on this machine; name an address that the other "
                "machines reach, by --master-addr or torchrun's --local-addr",
            )

    def check_interface(self) -> None:
        """Raises ParameterError for a GLOO_SOCKET_IFNAME that this machine does not have."""
        known = [name for _, name in socket.if_nameindex()]
        for name in os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK).split(","):
            if name not in known:
                message = f"GLOO_SOCKET_IFNAME names {name!r}; this machine has {', '.join(known)}"
                raise ParameterError("tensor_parallel_size", message)

    def environment(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def _sizes_that_fit(world_size: int, tensor_parallel_size: int) -> str:
    if world_size % tensor_parallel_size == 0:
        branch_parallel_size = world_size // tensor_parallel_size
        return f"with tensor_parallel_size {tensor_parallel_size}, branch_parallel_size must be {branch_parallel_size}"
    return f"start a multiple of {tensor_parallel_size} ranks"


def rank_in_environment() -> int | None:
    """This process's rank if torchrun, or a launcher like it, started it as one of several; else None. ParameterError
    as in ``from_environment``."""
    return Rendezvous.from_environment().rank if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def listen(host: str, port: int) -> socket.socket:
    """Listens at one address of this machine, given as address or name, and at no other. Port 0 means any free port.
    OSError if this machine does not have the address, or the port is in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)  # of IPv6 with the scope, which some need
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the rest repeats the address
        message = f"the ranks cannot meet at {host} port {port} ({reason}); MASTER_ADDR must be an address of "
        raise OSError(error.errno, f"{message}the machine of rank 0, and MASTER_PORT a free port of it") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
        return port


# ---- starting the ranks on this machine ------------------------------------------------------------------------------


class RankProcess(NamedTuple):
    """What to start for one rank, in a session of its own, so that signals of the terminal do not reach it. Its stdin
    must be a pipe: the process ends when that closes."""

    command: tuple[str, ...]
    environment: dict[str, str]


def local_rank_processes(
    config: EngineConfig, port: int, leader_command: tuple[str, ...] | None = None
) -> dict[int, RankProcess]:
    """The processes to start, by rank, if all ranks run on this machine. ``port`` is the store's. ``leader_command``
    starts rank 0; None if the calling process is rank 0."""
    follower = follower_command(config, ends_with_stdin=True)
    commands = dict.fromkeys(range(1, config.world_size), follower)
    if leader_command is not None:
        commands = {0: leader_command} | commands
    return {
        rank: RankProcess(command, os.environ | Rendezvous.on_this_machine(rank, config.world_size, port).environment())
        for rank, command in commands.items()
    }


def follower_command(config: EngineConfig, *, ends_with_stdin: bool) -> tuple[str, ...]:
    """The command of every rank but 0. ``ends_with_stdin``: it ends when its stdin closes, as when its parent ends."""
    ending = ["--ends-with-stdin"] if ends_with_stdin else []
    if ends_with_stdin and threading.current_thread() is threading.main_thread():  # another may end before the engine
        ending.append("--ends-with-parent")
    return sys.executable, "-m", "lopa_ascend.engine.follower", msgspec.json.encode(config).decode(), *ending


def share_cores(config: EngineConfig) -> EngineConfig:
    """Gives each rank an even share of this machine's cores as threads, unless there is one rank, or ``threads`` or
    OMP_NUM_THREADS is set."""
    if config.world_size == 1 or config.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return replace(config, threads=max(1, cores // config.world_size))


# ---- how a rank's process ends ---------------------------------------------------------------------------------------


def exit_when_stdin_closes() -> None:
    """Ends this process when its stdin closes, as when its parent ends for whatever reason."""

    def wait() -> None:
        sys.stdin.buffer.read()  # nothing is ever written to it
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def exit_with_parent() -> None:
    """Has the system kill this process when the thread that started it ends, even while it is stopped (SIGSTOP) and
    cannot read its stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_rank(failure: str) -> None:
    """Ends this process, a rank, at once. ``failure``, written to stderr, says which rank has failed, and how."""
    sys.stderr.write(f"rank {os.environ['RANK']} ends: {failure}\n")
    sys.stderr.flush()
    os._exit(OTHER_RANK_FAILED)


def kill_running(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kills ranks' processes without waiting for them; they hold nothing worth saving."""
    for process in processes:
        if process.returncode is None:
            process.kill()


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a process; False on a system without /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


class StopWatch:
    """Finds ranks that were stopped for ``timeout`` seconds while they start, before they watch one another."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._since: dict[int, float] = {}

    def check(self, pids: Mapping[int, int]) -> str | None:
        """Describes the rank that has been stopped for too long; None if none has. ``pids``: process ids by rank."""
        now = time.monotonic()
        self._since = {rank: self._since.get(rank, now) for rank, pid in pids.items() if is_stopped(pid)}
        for rank, since in self._since.items():
            if now - since >= self._timeout:
                return f"rank {rank} was stopped, by SIGSTOP or a debugger, for {self._timeout:g} s while it started"
        return None


def explain_exit(statuses: Mapping[int, int | None]) -> str | None:
    """Names the rank that has ended, and how, e.g. "rank 1: SIGKILL"; None while all run. If rank 0 is the only one,
    the answer does not name it. ``statuses``: by rank, as ``subprocess`` reports them."""
    ended = {rank: status for rank, status in statuses.items() if status is not None}
    if not ended:
        return None
    # A rank that ended because another one had failed is not the cause, so any other rank comes first.
    causes = [rank for rank, status in ended.items() if status != OTHER_RANK_FAILED]
    rank = (causes or [*ended])[0]
    how = _explain_status(ended[rank])
    return how if statuses.keys() == {0} else f"rank {rank}: {how}"


def _explain_status(status: int) -> str:
    if status == OTHER_RANK_FAILED:
        return "ended because another rank had failed, which the log names"
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
