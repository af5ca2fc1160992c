"""Where the ranks of an engine meet, and how the local ones are started. Knows no torch."""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import dataclass, replace

import msgspec

from lopa_ascend.config import EngineConfig, ParameterError

OTHER_RANK_FAILED = 3
"""Exit status of a rank that ends because of another one."""
LOCALHOST, LOOPBACK = "127.0.0.1", "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class Rendezvous:
    """Rank ``rank`` of ``world_size`` meets the others at ``host`` and ``port``. ``local``: all of them run on this
    machine."""

    rank: int
    world_size: int
    host: str
    port: int
    local: bool

    @classmethod
    def on_this_machine(cls, rank: int, world_size: int, port: int) -> Rendezvous:
        return cls(rank, world_size, LOCALHOST, port, local=True)

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """As torchrun says it.

        Raises:
            ParameterError: it says nothing.
        """
        try:
            rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            host = os.environ["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            message = f"several ranks need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment: {error}"
            raise ParameterError("tensor_parallel_size", message) from error
        if not 0 <= rank < world_size:
            raise ParameterError("tensor_parallel_size", f"RANK is {rank}, with a WORLD_SIZE of {world_size}")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
        return cls(rank, world_size, host, port, local)

    def check_world_size(self, config: EngineConfig) -> None:
        """Raises:
        ParameterError: another number of ranks was started than ``config`` asks for.
        """
        if self.world_size != config.world_size:
            tp, bp = config.tensor_parallel_size, config.branch_parallel_size
            raise ParameterError(
                "branch_parallel_size",
                f"tensor_parallel_size {tp} x branch_parallel_size {bp} are {tp * bp} ranks, but {self.world_size} "
                f"were started; {_fitting(self.world_size, tp)}",
            )

    def environment(self) -> dict[str, str]:
        """For the process that is to be this rank."""
        values = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.world_size}
        values |= {"LOCAL_WORLD_SIZE": self.world_size}
        return {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), **{k: str(v) for k, v in values.items()}}


def _fitting(world_size: int, tp: int) -> str:
    if world_size % tp == 0:
        return f"with tensor_parallel_size {tp}, branch_parallel_size must be {world_size // tp}"
    return f"start a multiple of {tp} ranks"


def rank_in_environment() -> int | None:
    """This process's rank, if torchrun or the like has started it as one of several.

    Raises:
        ParameterError: what it says of it is incomplete.
    """
    return Rendezvous.from_environment().rank if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def exit_when_stdin_closes() -> None:
    """Ends this process when its stdin does, that is when its parent has ended, in whatever way that came about."""

    def wait() -> None:
        sys.stdin.buffer.read()  # nothing is ever written to it
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def exit_rank(failure: str) -> None:
    """Ends this process, a rank, at once: the ranks cannot go on without the one that the failure is about."""
    sys.stderr.write(f"rank {os.environ['RANK']} ends: {failure}\n")
    sys.stderr.flush()
    os._exit(OTHER_RANK_FAILED)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
        return port


def follower_command(config: EngineConfig, *, with_parent: bool) -> tuple[str, ...]:
    """The command of a rank other than 0. ``with_parent``: it ends when its stdin does."""
    ending = ("--ends-with-stdin",) if with_parent else ()
    return sys.executable, "-m", "lopa_ascend.engine.follower", msgspec.json.encode(config).decode(), *ending


def share_cores(config: EngineConfig) -> EngineConfig:
    """``config`` for ranks that share this machine's cores evenly, unless somebody has said how many threads each is to
    have."""
    if config.world_size == 1 or config.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return config
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return replace(config, threads=max(1, cores // config.world_size))
