"""Evaluates and quantises models: python -m scripts.eval SUBCOMMAND [ARGUMENT ...]"""

from __future__ import annotations

import argparse
import importlib

from lopa_ascend.config.settings import HelpFormatter

SUBCOMMANDS = {
    "demo": "exact answers and tokens per forward pass of the bundled model on its problems",
    "filling": "an animated picture of D2F and LoPA filling the same answer",
    "tasks": "scores, TPF and AUP of a model on published tasks, through lm-eval",
    "paper-tables": "a table of the LoPA paper, with our numbers beside the published ones",
    "golden": "whether tokens and fills are those that published code was recorded with",
    "answers": "writes the answers of a CPU, which a server repeats at start (--check-answers)",
    "quantize": "writes a checkpoint in W8A8 or int4",
    "make-checkpoint": "writes a random checkpoint of a family, to try it without its weights",
}
"""What each one does; the module of the same name has a function ``main``, which takes the arguments."""
ELSEWHERE = {"golden": "tests.golden_families"}
"""Module of a subcommand that is not here: recorded traces and what reads them are the tests'."""


def main(argv: list[str] | None = None) -> None:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"    {name:{width}s}   {text}" for name, text in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval",
        usage="%(prog)s SUBCOMMAND [ARGUMENT ...]",
        description=f"Evaluates and quantises models.\n\n{listed}\n\nSUBCOMMAND --help says what it takes.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("subcommand", choices=tuple(SUBCOMMANDS), metavar="SUBCOMMAND", help="one of these")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the subcommand")
    args = parser.parse_args(argv)
    # Only now, because some modules need packages that others do without.
    name = ELSEWHERE.get(args.subcommand, f"scripts.eval.{args.subcommand.replace('-', '_')}")
    importlib.import_module(name).main(args.arguments)


if __name__ == "__main__":
    main()
