"""A rank other than 0: `python -m lopa_ascend.engine.follower CONFIG`, with the engine's configuration as JSON.

Who it is and where the ranks meet stands in the environment, as torchrun says it. The server and `LLM` start it; nobody
needs to by hand.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, exit_when_stdin_closes

logger = logging.getLogger(__name__)


def run(config: EngineConfig) -> int:
    """Follows rank 0 to its end; returns the exit status."""
    from lopa_ascend.engine.engine import Engine  # bring torch, which takes seconds
    from lopa_ascend.engine.ranks import follow
    from lopa_ascend.parallel.mesh import Mesh

    mesh = Mesh.join(config, Rendezvous.from_environment(), exit_rank)
    # torchrun sends it to every rank; rank 0 lets its requests end first, and the watch tells when it has.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        engine = Engine(config, mesh)
    except BaseException as error:
        mesh.close(None if mesh.start_refused else f"it could not start ({type(error).__name__})")
        if mesh.start_refused:  # rank 0 says it
            return 1
        raise
    follow(engine)
    mesh.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lopa_ascend.engine.follower", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--ends-with-stdin", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.ends_with_stdin:
        exit_when_stdin_closes()
    status = 1
    try:
        status = run(msgspec.json.decode(arguments.config, type=EngineConfig))
    except Exception:
        logger.exception("rank %s ends", os.environ.get("RANK"))
    finally:
        sys.stderr.flush()
        os._exit(status)  # taking torch down takes seconds on a busy machine


if __name__ == "__main__":
    main()
