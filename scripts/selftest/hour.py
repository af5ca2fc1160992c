"""Runs the steps of a GPU's examination one after the other, each in a process of its own: a step that hangs is killed,
and what it has found until then is kept. This process never touches the GPU.

The report is written whenever anything is found. What a step is expected to find is in it before the step begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One thing that was found: "name", its values, and a "verdict" if it can be wrong."""
Report = dict[str, list[Row]]
"""By the name of a step what it found."""
WRONG, LEFT_OUT = "WRONG", "left out"
BAD = (WRONG, "failed", "hung", "died")
"""Verdicts that are faults."""
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError)
"""What an op raises that the device or this software cannot run."""
SECONDS_TO_DIE = 10.0
MAX_MESSAGE = 300


@dataclass(frozen=True)
class Step:
    """A part of the examination."""

    name: str
    seconds: float
    """After which it hangs."""
    expected: str
    """What it should find; written before it begins."""
    run: Callable[[Report], Iterator[Row]]
    is_needed: bool = False
    """Whether nothing that follows means anything where this step finds a fault."""


class Examination:
    """The report of some steps.

    Args:
        file: where it goes as JSON; None to print it alone.
        seconds: for all steps together.
    """

    def __init__(self, file: Path | None, seconds: float) -> None:
        self._file, self._end = file, time.monotonic() + seconds
        self._steps: list[Row] = []
        self._found: Report = {}

    def run(self, steps: list[Step]) -> list[str]:
        """What is wrong, one line for each fault, after the steps up to the first needed one with a fault."""
        for number, step in enumerate(steps):
            faults = self._run(step)
            if faults and step.is_needed:
                for other in steps[number + 1 :]:
                    self._steps.append({"step": other.name, "verdict": LEFT_OUT, "message": f"after {step.name}"})
                self._write()
                break
        return self.faults()

    def faults(self) -> list[str]:
        """One line for each fault of all steps until now."""
        return [
            f"{step['step']}: {_shown(row)}"
            for step in self._steps
            for row in (*step.get("found", ()), {"verdict": step["verdict"], "message": step.get("message")})
            if row.get("verdict") in BAD and (row["verdict"] != WRONG or "name" in row)
        ]

    def _run(self, step: Step) -> bool:
        """Whether the step found a fault, or did not come to its end."""
        rows: list[Row] = []
        self._found[step.name] = rows
        limit, begin = min(step.seconds, self._end - time.monotonic()), time.monotonic()
        entry: Row = {"step": step.name, "expected": step.expected, "verdict": "running", "found": rows}
        self._steps.append(entry)
        _say(f"\n{step.name}: expected {entry['expected']}")
        self._write()
        if limit <= 0:
            entry |= {"verdict": LEFT_OUT, "message": "no time"}
        else:
            verdict, message = self._watched(step, limit, rows)
            is_bad = any(row.get("verdict") in BAD for row in rows)
            entry |= {"verdict": WRONG if is_bad and verdict == "ok" else verdict, "message": message}
        entry["seconds"] = round(time.monotonic() - begin, 1)
        _say(f"  {step.name}: {entry['verdict']} {entry['message']} ({entry['seconds']} s)")
        self._write()
        return entry["verdict"] in BAD

    def _watched(self, step: Step, limit: float, rows: list[Row]) -> tuple[str, str]:
        """Verdict and message of a step that runs in a child, whose rows are kept as they come."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_run_child, args=(step, self._found, theirs))
        child.start()
        theirs.close()
        end = time.monotonic() + limit
        with ours, suppress(EOFError):
            while ours.poll(max(0.0, end - time.monotonic())):
                rows.append(ours.recv())
                _say("  " + _shown(rows[-1]))
                self._write()
        child.join(max(0.0, end - time.monotonic()))
        if child.exitcode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid or 0, signal.SIGKILL)
            child.kill()
            child.join(SECONDS_TO_DIE)
            lasts = "" if child.exitcode is not None else ", and does not end by SIGKILL"
            return "hung", f"ended after {limit:.0f} s{lasts}"
        return ("ok", "") if child.exitcode == 0 else ("died", f"exit code {child.exitcode}")

    def _write(self) -> None:
        if self._file is not None:
            new = self._file.with_name(f"{self._file.name}.new")
            new.write_text(json.dumps({"steps": self._steps, "faults": self.faults()}, indent=1) + "\n")
            new.replace(self._file)


def _run_child(step: Step, found: Report, connection: Connection) -> None:
    """Sends what the step finds. It leads a process group, which is ended with it."""
    os.setsid()
    try:
        for row in step.run(found):
            connection.send(row)
    except ModuleNotFoundError as error:
        connection.send({"name": step.name, "verdict": LEFT_OUT, "message": f"needs {error.name}"})
    except Exception as error:  # noqa: BLE001  # whatever it is, the other steps go on
        message = f"{type(error).__name__}: {shortened(error)}"
        connection.send({"name": step.name, "verdict": "failed", "message": message})
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # threads and graphs that remain are not waited for


def shortened(error: Exception) -> str:
    """The beginning of an error's text on one line, without folders and addresses of this machine."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    text = re.sub(r"(?<![\w./])(?:/[^\s/:'\"()\[\],]+)+/", "", text)
    return re.sub(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "<address>", text)[:MAX_MESSAGE]


def _shown(row: Row) -> str:
    values = (f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in row.values())
    return "; ".join(text if name == "name" else f"{name} {text}" for name, text in zip(row, values, strict=True))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
