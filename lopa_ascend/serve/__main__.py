"""The commands `lopa-serve` and `python -m lopa_ascend.serve`."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lopa_ascend.parallel.launch import follower_command, rank_in_environment
from lopa_ascend.process.standard_streams import open_closed_streams, write_as_possible
from lopa_ascend.serve.cli import API_KEY, COMMAND, parse_args
from lopa_ascend.serve.config import ServeConfig


def _exit_at_once(*_: object) -> None:
    # During a download and the imports there is nothing to clean up. An exception would wait for whole files, or be
    # raised inside an import, which may turn it into another exception.
    os._exit(0)


def _serve(config: ServeConfig) -> int:
    """Serves until the end; returns the exit status. FastAPI and Ray take long to import, so that comes here."""
    if config.replicas is None:
        from lopa_ascend.serve.server import serve

        return serve(config)
    if "RAY_ADDRESS" not in os.environ:
        # Ray reads this when it is imported. All its processes then listen on the loopback interface alone.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Serve's replicas listen on all of them nevertheless
    if find_spec("ray") is None:
        sys.stderr.write("error: --replicas needs Ray Serve, which is not installed: pip install 'ray[serve]'\n")
        return 1
    from lopa_ascend.serve.replicas.command import run

    return run(config)


def main(argv: list[str] | None = None) -> NoReturn:
    open_closed_streams()
    signal.signal(signal.SIGINT, _exit_at_once)
    signal.signal(signal.SIGTERM, _exit_at_once)
    if Path(sys.argv[0]).stem == COMMAND:
        # Unlike `python -m` it imports nothing from the working directory, nor must the processes that it starts.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    config = parse_args(argv)
    os.environ.pop(API_KEY, None)  # no other process needs it: not the engine's, not Ray's
    write_as_possible()
    rank = rank_in_environment()
    if rank is not None and rank > 0:
        # torchrun starts this command for each rank, and rank 0 alone serves HTTP.
        command = follower_command(config.engine, ends_with_stdin=False)
        os.execv(command[0], command)
    status = _serve(config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # does not wait for threads, which may still tokenize a very long prompt


if __name__ == "__main__":
    main()
