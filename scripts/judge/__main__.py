"""Runs the judges: all, or those that are named. Exit status 1 if one finds fault.

python -m scripts.judge                                  every judge, each with a server of its own
python -m scripts.judge faults --hostile 500             one of them, shorter
python -m scripts.judge schema --url http://host:8000    a server that runs already (not with kill, ranks and soak)
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from scripts.judge.report import Options, Report

JUDGES = ("schema", "accuracy", "load", "faults", "kill", "ranks", "soak")
"""Modules of this package, each with a function ``judge(options, report)``."""
HELP = {
    "examples": "schema: examples an endpoint",
    "problems": "accuracy: held-out problems",
    "requests": "load: requests",
    "clients": "load: concurrent clients",
    "hostile": "faults: hostile requests",
    "good": "faults: good requests beside them",
    "minutes": "soak: how long",
    "seed": "of all that is random",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.judge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="JUDGE", help=f"of {', '.join(JUDGES)} (default: all)")
    parser.add_argument("--url", help="of a running server that serves the bundled model")
    parser.add_argument("--out", type=Path, help="directory of logs and reports (default: a new temporary one)")
    defaults = {field.name: field.default for field in fields(Options)}
    for name, text in HELP.items():
        default = defaults[name]
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    args = vars(parser.parse_args())
    names = args.pop("names") or JUDGES
    if unknown := [name for name in names if name not in JUDGES]:
        parser.error(f"unknown judge {unknown[0]!r}; there are {', '.join(JUDGES)}")
    args["out"] = (args["out"] or Path(tempfile.mkdtemp(prefix="judge-"))).resolve()
    args["out"].mkdir(parents=True, exist_ok=True)
    options, failed = Options(**args), []
    # As an exception, which ends the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"logs and reports: {options.out}")
    for name in names:
        module, report, start = importlib.import_module(f"scripts.judge.{name}"), Report(), time.monotonic()
        print(f"{name}: {(module.__doc__ or '').removeprefix('Judge: ')}", flush=True)
        module.judge(options, report)
        print(f"  {time.monotonic() - start:.0f} s")
        failed += [f"{name}: {what}" for what in report.failed]
    print("\n".join(["FAILED", *failed]) if failed else "all judges are content")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
