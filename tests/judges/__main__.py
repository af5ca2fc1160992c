"""Runs the judges, which test a server from outside: all of them, or those that are named.

    python -m tests.judges                                  every judge, each on a server that it starts
    python -m tests.judges faults --hostile 500             one of them, shorter
    python -m tests.judges schema --url http://host:8000    a running server (all but the last five judges)

  schema     schemathesis finds no fault with the server's own /openapi.json
  accuracy   lm-eval over HTTP finds the accuracy that the engine has without a server
  clients    conversations of other projects' clients are read as they send them back; evalplus works unchanged
  load       guidellm's concurrent clients get all their tokens
  faults     hostile requests are refused, and disturb no other request
  starve     requests that cost much delay no other client
  fuzz       random requests, odd and large, delay no other client
  kill       when the engine is killed, every client gets an error, and the server ends
  ranks      the same when a rank is killed or stopped
  structured clients that ask for answers in a form, or for calls of functions, get them
  soak       minutes of mixed load leave memory, pages and answers as they were
  replicas   on Ray Serve, no request is lost when engines, ranks, actors or nodes end

Prints a line for each verdict, "ok" or FAILED with what was found; the exit status is 1 if one is FAILED. schema,
accuracy, load, fuzz and replicas need public tools, and all judges need httpx: pip install -e '.[judge]', or
./ci/judges.sh, which installs them first, and the clients too.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from lopa_ascend.config.settings import HelpFormatter
from scripts.arguments import number_from, positive
from tests.judges.report import Options, Report

JUDGES = (
    "schema",
    "accuracy",
    "clients",
    "load",
    "faults",
    "starve",
    "fuzz",
    "kill",
    "ranks",
    "structured",
    "soak",
    "replicas",
)
"""Modules of this package, each with a function ``judge(options, report)``."""
OWN_SERVER = ("kill", "ranks", "structured", "soak", "replicas")
"""Judges that need the processes of a server, so they start one themselves."""
NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "examples": (number_from(1), "schema: examples for each endpoint"),
    "problems": (number_from(1), "accuracy: held-out problems"),
    "requests": (number_from(1), "load: requests"),
    "clients": (number_from(1), "load: concurrent clients"),
    "hostile": (number_from(0), "faults: hostile requests, at least one of each kind"),
    "good": (number_from(1), "faults: good requests beside them"),
    "fuzz_seconds": (positive, "fuzz: duration in seconds"),
    "minutes": (positive, "soak: duration in minutes"),
    "runs": (number_from(1), "replicas: faults under load"),
    "seed": (number_from(0), "seed of everything that is random"),
}
"""By field of Options: how the flag of its name is parsed, and its help."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("names", nargs="*", metavar="JUDGE", help=f"{', '.join(JUDGES)} (default: all)")
    parser.add_argument("--url", help="a running server with the bundled model (default: servers are started here)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="logs and reports (default: a new temporary directory)")
    defaults = {field.name: field.default for field in fields(Options)}
    for name, (parse, text) in NUMBERS.items():
        default = defaults[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=parse,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    return parser


def main() -> None:
    parser = build_parser()
    args = vars(parser.parse_args())
    names = _chosen(parser, args.pop("names"), args["url"])
    args["out"] = (args["out"] or Path(tempfile.mkdtemp(prefix="judge-"))).resolve()
    args["out"].mkdir(parents=True, exist_ok=True)
    options = Options(**args)
    # Raises SystemExit, so that the servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"logs and reports: {options.out}")
    failed = [f"{name}: {what}" for name in names for what in _run(name, options)]
    print("\n".join(["FAILED", *failed]) if failed else "all judges are content")
    sys.exit(bool(failed))


def _chosen(parser: argparse.ArgumentParser, names: Sequence[str], url: str | None) -> Sequence[str]:
    """The judges to run: the named ones. Without names these are all judges, or with a ``url`` all that can judge a
    running server.

    Raises:
        SystemExit: a name is unknown, or is that of a judge that cannot judge this server.
    """
    if unknown := [name for name in names if name not in JUDGES]:
        parser.error(f"unknown judge {unknown[0]!r}; there are {', '.join(JUDGES)}")
    if url is None:
        return names or JUDGES
    if own := [name for name in names if name in OWN_SERVER]:
        parser.error(f"{own[0]} needs the processes of a server that it starts; leave --url out")
    if not names:
        print(f"left out, because they need the processes of a server that they start: {', '.join(OWN_SERVER)}")
    return names or [name for name in JUDGES if name not in OWN_SERVER]


def _run(name: str, options: Options) -> list[str]:
    """Runs one judge; returns what has failed."""
    report, start = Report(), time.monotonic()
    try:
        module = importlib.import_module(f"tests.judges.{name}")
        print(f"{name}: {(module.__doc__ or '').removeprefix('Judge: ')}", flush=True)
        module.judge(options, report)
    except Exception as error:  # noqa: BLE001  # what a broken server leads to is a verdict, and the other judges go on
        traceback.print_exc()
        report.check(f"runs to its end without {type(error).__name__}", False, error)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return report.failed


if __name__ == "__main__":
    main()
