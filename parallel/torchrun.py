"""torchrun for the launch scripts: `python -m lopa_ascend.parallel.torchrun`, with the flags of torchrun.

It differs from torchrun in two things. The store through which the ranks find each other listens on ``--master-addr``
alone; that of torchrun listens on every interface, and lets everybody read and write. And a signal that ends it is no
error: after SIGTERM or SIGINT the exit status is 0, and there is no traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

BACKEND = "lopa"
"""Name of the rendezvous in torch's registry."""
NODES_TIMEOUT = 600
"""Seconds in which all nodes must have come, as with torchrun."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a launch; torchrun's own handlers replace ours once it has started ranks."""


def _exit_at_once(*_: object) -> None:
    os._exit(0)  # no rank has been started yet, and an exception would be raised inside an import


def _end_at_signals() -> None:
    """Lets ``_SIGNALS`` end this process at once, until torchrun installs handlers of its own.

    While torch waits for other nodes, outside of Python, no handler of Python runs. So a thread watches the numbers
    that Python writes for each signal.
    """
    for number in _SIGNALS:
        signal.signal(number, _exit_at_once)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    Thread(target=_watch_signals, args=(reader,), daemon=True).start()


def _watch_signals(reader: int) -> None:
    """Ends the process when the number of a signal that ``_exit_at_once`` handles comes out of a pipe."""
    while number := os.read(reader, 1):
        if signal.getsignal(number[0]) is _exit_at_once:
            os._exit(0)


def run(arguments: Sequence[str]) -> int:
    """Runs ranks as torchrun does with these arguments; returns the exit status."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    flags: Any = parse_args([*arguments])
    if flags.standalone or flags.rdzv_endpoint or flags.rdzv_backend != "static":
        raise ValueError("the ranks meet at --master-addr and --master-port; other rendezvous are not supported")
    if flags.master_port is None:
        raise ValueError("--master-port is missing")
    _register()
    host = f"[{flags.master_addr}]" if ":" in flags.master_addr else flags.master_addr
    flags.rdzv_backend, flags.rdzv_endpoint = BACKEND, f"{host}:{flags.master_port}"
    flags.rdzv_conf = f"rank={flags.node_rank}"
    flags.node_rank = 0  # torch warns of any other one where the rendezvous is not its own static one
    config, command, command_arguments = config_from_args(flags)
    try:
        elastic_launch(config, command)(*command_arguments)
    except SignalException as signalled:
        _end_ranks()
        return 0 if signalled.sigval in _SIGNALS else 128 + signalled.sigval
    except ChildFailedError as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    except (DistNetworkError, DistStoreError) as failure:
        num_nodes, place = config.max_nodes, flags.rdzv_endpoint
        sys.stderr.write(
            f"error: not all of {num_nodes} nodes met at {place} within {NODES_TIMEOUT} s, or one has left: {failure}\n"
        )
        return 1
    return 0


def _end_ranks() -> None:
    """Ends ranks that still run: torchrun forgets one that it is just starting when a signal comes.

    The environment of such a rank is empty for a moment, while the system replaces this program by the rank's.
    """
    for pid in _children():
        with suppress(OSError):  # it has ended
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if not environment or b"TORCHELASTIC_RUN_ID=" in environment:
                os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """The processes that this one has started."""
    pids: list[int] = []
    for file in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += map(int, file.read_text().split())
    return pids


def _register() -> None:
    """Makes ``BACKEND`` known to torch: its static rendezvous, with a store that listens on one address."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from lopa_ascend.parallel.store import serve_store

    class BoundRendezvous(StaticTCPRendezvous):
        """Nodes that are known beforehand, of which node 0 serves the store."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self.rank == 0 and not self._store:
                self._store = serve_store(self.master_addr, self.master_port)
                self._store.set_timeout(self.timeout)
            return super().next_rendezvous()

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        rank, nodes = int(parameters.config["rank"]), parameters.max_nodes
        return BoundRendezvous(host, port, rank, nodes, parameters.run_id, NODES_TIMEOUT)

    rendezvous_handler_registry.register(BACKEND, create)


def main() -> None:
    _end_at_signals()
    try:
        status = run(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
