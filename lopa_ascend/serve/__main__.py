"""Entry of `python -m lopa_ascend.serve`."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from lopa_ascend.parallel.launch import follower_command, rank_in_environment
from lopa_ascend.serve.cli import parse_args


def _leave(*_: object) -> None:
    # During the imports there is nothing to clean up, and an exception inside one would become another one.
    os._exit(0)


def main(argv: list[str] | None = None) -> NoReturn:
    config = parse_args(argv)
    if rank_in_environment():
        # torchrun starts this command once a rank, and rank 0 alone speaks HTTP.
        command = follower_command(config.engine, ends_with_stdin=False)
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    from lopa_ascend.serve.server import serve  # brings FastAPI

    status = serve(config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads may still be in the tokenizer with a very long prompt


if __name__ == "__main__":
    main()
