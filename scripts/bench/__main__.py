"""Measures and predicts speed.

    python -m scripts.bench decode   this engine in this process: tokens, forward passes, CPU seconds and their parts
    python -m scripts.bench llama    forward passes of this engine beside llama.cpp's
    python -m scripts.bench serve    a server under load: latency, tokens/s, and how fine its streams are
    python -m scripts.bench grammars what structured output costs
    python -m scripts.bench ranks    what ranks send each other
    python -m scripts.bench plan     how long a step takes on a device, and the best (tp, bp, k)

Each of them has a --help of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lopa_ascend.config.settings import HelpFormatter
from scripts.bench import decode, grammars, llama, ranks, serve
from scripts.bench.plan import command as plan

COMMANDS = {"decode": decode, "llama": llama, "serve": serve, "grammars": grammars, "ranks": ranks, "plan": plan}
"""Modules that have ``add_flags`` and ``run``; none loads torch before it runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar=f"{{{','.join(COMMANDS)}}}")
    parsers = {}
    for name, module in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, description=module.__doc__, formatter_class=HelpFormatter, allow_abbrev=False
        )
        module.add_flags(parsers[name])
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except ValueError as error:  # what people can get wrong
        parsers[args.command].error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
