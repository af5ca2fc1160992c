"""A rank other than 0: `python -m lopa_ascend.engine.follower CONFIG`, with the engine's configuration as JSON.

Its rank and the address where the ranks meet are in the environment variables of torchrun (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT). The server and `LLM` start this command; there is no need to run it by hand.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from lopa_ascend.config import EngineConfig
from lopa_ascend.config.settings import HelpFormatter
from lopa_ascend.parallel.launch import Rendezvous, exit_rank, exit_when_stdin_closes, exit_with_parent
from lopa_ascend.process.standard_streams import open_closed_streams, write_as_possible

logger = logging.getLogger(__name__)


def run(config: EngineConfig) -> int:
    """Follows rank 0 until it ends the engine; returns the exit status."""
    from lopa_ascend.engine.ranks import follow, make_engine  # these import torch, which takes seconds
    from lopa_ascend.parallel.collectives import RankError
    from lopa_ascend.parallel.mesh import Mesh, StartError

    try:
        mesh = Mesh.join(config, Rendezvous.from_environment(), exit_rank)
    except StartError:
        return 1  # rank 0 says why
    # torchrun sends SIGTERM to every rank. Rank 0 lets its requests end first, and then ends this rank.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("lopa_ascend.families").setLevel(logging.ERROR)  # rank 0 warns of fields of config.json
    try:
        engine = make_engine(config, mesh)
    except BaseException:
        if mesh.start_refused:  # rank 0 says why
            return 1
        raise
    try:
        follow(engine)
    except RankError as error:
        mesh.close(str(error))  # the others must not take this rank for the one that has failed
        exit_rank(str(error))  # it names the rank that has ended; a traceback of this one would say no more
    except Exception as error:
        # Before the others know, because rank 0 then ends, and this process with it.
        logger.exception("rank %s ends", os.environ.get("RANK"))
        sys.stderr.flush()
        mesh.close(f"{type(error).__name__}: {error}")
        return 1
    mesh.close()
    return 0


def main() -> None:
    open_closed_streams()
    write_as_possible()
    parser = argparse.ArgumentParser(
        prog="python -m lopa_ascend.engine.follower",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("config", help="the engine's configuration as JSON, equal on all ranks")
    parser.add_argument("--ends-with-stdin", action="store_true", help="end when stdin closes, as when the parent ends")
    parser.add_argument("--ends-with-parent", action="store_true", help="end with the thread that has started it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for rank 0
    if arguments.ends_with_parent:
        exit_with_parent()
    if arguments.ends_with_stdin:
        exit_when_stdin_closes()
    status = 1
    try:
        status = run(msgspec.json.decode(arguments.config, type=EngineConfig))
    except Exception:
        logger.exception("rank %s ends", os.environ.get("RANK"))
    finally:
        sys.stderr.flush()
        os._exit(status)  # an orderly exit of torch takes seconds on a busy machine


if __name__ == "__main__":
    main()
