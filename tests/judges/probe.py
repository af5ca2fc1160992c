"""Two small requests that are sent over and over while other clients do something: `python -m tests.judges.probe URL`.

A process of its own sends them and writes a line of JSON for each, so that the other clients' work does not delay it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.judges.answers import parse
from tests.judges.client import COMPLETIONS
from tests.judges.server import ROOT

NAMES = ("version", "completion")
"""GET /version, which needs the event loop alone, and a completion request, which needs the engine."""
PAUSE = 0.05
"""Seconds between two probes."""
PROBE_TIMEOUT = 120.0
"""Seconds after which a probe counts as not answered."""
BODY = {"prompt": "Tom has 12 apples.", "max_tokens": 4, "ignore_eos": True, "stop": ["never there"]}
ALLOWED = 1.0
"""Seconds that a probe may always take."""
FACTOR = 10.0
"""How many times its median without other clients a probe may take beyond that: a slow machine is slow for all."""


@dataclass(frozen=True)
class Sample:
    """One probe."""

    name: str
    """One of NAMES."""
    end: float
    """When the answer was there, in seconds of ``time.monotonic``."""
    seconds: float
    answer: str
    """Status and text."""

    @property
    def start(self) -> float:
        """When the request was sent, in seconds of ``time.monotonic``."""
        return self.end - self.seconds


@dataclass
class Probe:
    """What the probes have seen so far."""

    samples: list[Sample] = field(default_factory=list)

    def since(self, start: float, name: str) -> list[Sample]:
        """The probes of one name that were answered after ``start``."""
        return [sample for sample in self.samples if sample.name == name and sample.end >= start]

    def quiet(self, seconds: float) -> Quiet:
        """Watches the probes for some seconds, without other clients.

        Raises:
            RuntimeError: a probe does not end.
        """
        start = time.monotonic()
        time.sleep(seconds)
        if silent := self.await_each(start, seconds + len(NAMES) * (PROBE_TIMEOUT + ALLOWED)):
            raise RuntimeError(f"no probe of {silent} has ended")
        found = {name: self.since(start, name) for name in NAMES}
        return Quiet(
            answers={name: {sample.answer for sample in samples} for name, samples in found.items()},
            medians={name: statistics.median(sample.seconds for sample in samples) for name, samples in found.items()},
        )

    def await_each(self, start: float, seconds: float) -> list[str]:
        """Waits until a probe of each name that was sent after ``start`` has ended.

        Args:
            start: a time, in seconds of ``time.monotonic``.
            seconds: how long to wait, from ``start`` on.

        Returns:
            The names of which there is no such probe in time.
        """
        while silent := [n for n in NAMES if not any(sample.start >= start for sample in self.since(start, n))]:
            if time.monotonic() > start + seconds:
                return silent
            time.sleep(PAUSE)
        return []

    def faults(self, start: float, quiet: Quiet) -> list[str]:
        """What is wrong with the probes since ``start``; to be asked when the other clients have stopped.

        Waits for one more answer to each of them, because a probe that is never answered leaves no sample.
        """
        silent = self.await_each(time.monotonic(), quiet.patience)
        samples = [sample for name in NAMES for sample in self.since(start, name)]
        return [*(f"{name}: no answer within {quiet.patience:.1f} s" for name in silent), *quiet.faults(samples)]


@dataclass(frozen=True)
class Quiet:
    """What the probes see without other clients."""

    answers: dict[str, set[str]]
    """By name of a probe; one each, if the server works."""
    medians: dict[str, float]
    """Seconds by name of a probe."""

    @property
    def is_steady(self) -> bool:
        """Whether each probe has one answer, with status 200."""
        return all(len(found) == 1 and min(found).startswith("200 ") for found in self.answers.values())

    @property
    def patience(self) -> float:
        """Seconds in which each probe is sent and answered if all are as quick as allowed: they take turns, and one may
        be under way."""
        return len(NAMES) * sum(map(self.allowed, NAMES))

    def allowed(self, name: str) -> float:
        """Most seconds that a probe may take beside other clients."""
        return ALLOWED + FACTOR * self.medians[name]

    def faults(self, samples: list[Sample]) -> list[str]:
        """What is wrong with probes: slow ones, and answers that differ."""
        slow = [sample for sample in samples if sample.seconds > self.allowed(sample.name)]
        other = [sample for sample in samples if {sample.answer} != self.answers[sample.name]]
        return [
            *(f"{s.name} after {s.seconds:.2f} s (at most {self.allowed(s.name):.2f})" for s in slow),
            *(f"{s.name}: {s.answer} instead of {self.answers[s.name]}" for s in other),
        ]


@contextmanager
def probing(url: str) -> Iterator[Probe]:
    """Probes a server during the ``with`` block."""
    command = [sys.executable, "-m", "tests.judges.probe", url]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    probe, lines = Probe(), process.stdout

    def collect() -> None:
        for line in lines:
            probe.samples.append(Sample(**json.loads(line)))

    reader = threading.Thread(target=collect, name="probe", daemon=True)
    reader.start()
    try:
        yield probe
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _send(client: httpx.Client, name: str) -> Sample:
    start = time.monotonic()
    try:
        if name == "version":
            response = client.get("/version")
            answer = f"{response.status_code} {response.text}"
        else:
            response = client.post(COMPLETIONS, json=BODY)
            answer = f"{response.status_code} {parse(response.content).get('choices') or response.text[:300]}"
    except (httpx.HTTPError, ValueError) as error:
        answer = f"{type(error).__name__}: {error}"
    end = time.monotonic()
    return Sample(name, end, end - start, answer)


def main() -> None:
    with httpx.Client(base_url=sys.argv[1], timeout=PROBE_TIMEOUT) as client:
        while True:
            for name in NAMES:
                print(json.dumps(vars(_send(client, name))), flush=True)
                time.sleep(PAUSE)


if __name__ == "__main__":
    main()
