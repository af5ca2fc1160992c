"""Measures and predicts speed. Each command has a --help of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lopa_ascend.config.settings import HelpFormatter
from scripts.arguments import is_refusal
from scripts.bench import decode, grammars, llama, ranks, serve
from scripts.bench.plan import command as plan

COMMANDS = {"decode": decode, "llama": llama, "serve": serve, "grammars": grammars, "ranks": ranks, "plan": plan}
"""Modules that have ``add_flags`` and ``run``; none loads torch before it runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    options: dict[str, Any] = {"formatter_class": HelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="python -m scripts.bench", description=__doc__, **options)
    commands = parser.add_subparsers(required=True, dest="command", title="commands", metavar="COMMAND")
    parsers = {}
    for name, module in COMMANDS.items():
        first = str(module.__doc__).partition("\n")[0]
        parsers[name] = commands.add_parser(name, help=first, description=module.__doc__, **options)
        module.add_flags(parsers[name])
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except (ValueError, OSError) as error:
        if not is_refusal(error):
            raise
        parsers[args.command].error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
