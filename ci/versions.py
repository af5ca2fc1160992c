"""Runs the tests on the versions of Python, torch and transformers that docs/troubleshooting.md names.

    pip install -e '.[ci]'
    nox -f ci/versions.py                       every combination, and the table of results
    nox -f ci/versions.py -s "tests(python='3.11', torch='2.6.0', transformers='4.46.3')" table

Each combination gets an environment of its own; a Python that is not installed is skipped. Where pip finds no CPU build
of a torch, it takes gigabytes of CUDA libraries. The results stay in build/versions, one file a combination, and
``table`` prints them.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "versions"
TESTS = ("tests/unit", "tests/torch", "tests/e2e/test_golden.py", "tests/e2e/test_llm.py")
CHECKS = "tests/unit/test_architecture.py"
"""Left out: checks of the sources, which do not depend on versions."""
COMBINATIONS = (
    ("3.11", "2.13.0", "5.23.0"),
    ("3.10", "2.6.0", "4.46.3"),
    ("3.11", "2.6.0", "4.46.3"),
    ("3.13", "2.9.1", "4.57.6"),
)
"""(Python, torch, transformers): those of docs/troubleshooting.md."""

nox.options.envdir = str(ROOT / "build" / "nox")
nox.options.error_on_missing_interpreters = False


@nox.session
@nox.parametrize("python,torch,transformers", COMBINATIONS)
def tests(session: nox.Session, torch: str, transformers: str) -> None:
    """The unit, torch and golden tests."""
    session.chdir(ROOT)
    session.install(f"torch=={torch}")
    session.install(f"torch=={torch}", f"transformers=={transformers}", "-e", ".[test]")
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = RESULTS / f"{session.python}-{torch}-{transformers}.json"
    report = result.with_suffix(".xml")
    for file in (result, report):  # if the tests cannot run, the table must not show those of an earlier run
        file.unlink(missing_ok=True)
    session.run(
        *("python", "-m", "pytest", "-q", f"--junitxml={report}", f"--ignore={CHECKS}", *TESTS),
        env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        success_codes=[0, 1],  # 1: tests have failed; others: they did not run
    )
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    names = {"python": session.python, "torch": torch, "transformers": transformers}
    result.write_text(json.dumps(names | counts))
    if counts["failures"] or counts["errors"]:
        session.error(f"{counts['failures']} tests failed, and {counts['errors']} could not run")


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """Prints the results of all combinations that have run."""
    print("| Python | torch | transformers | passed | failed | skipped |\n|---|---|---|---|---|---|")
    for file in sorted(RESULTS.glob("*.json")):
        row = json.loads(file.read_text())
        failed = row["failures"] + row["errors"]
        passed = row["tests"] - failed - row["skipped"]
        versions = f"{row['python']} | {row['torch']} | {row['transformers']}"
        print(f"| {versions} | {passed} | {failed} | {row['skipped']} |")
