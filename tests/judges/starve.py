"""Judge: while a client sends what costs the server most, others are answered as quickly and with the same text."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from tests.judges.attack import KINDS, is_refused, outcome_of
from tests.judges.hostile_costs import COSTLY
from tests.judges.probe import NAMES, probing
from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, peak_resident, serving

QUIET = 5.0
"""Seconds of the measurement without other clients."""
MIB = 2**20
MAX_GROWTH = 256
"""MiB by which the attacks may let the HTTP process grow: bodies, one of them in its parsed form, and some more."""


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "starve.log") as server, probing(server.url) as probe:
        quiet = probe.quiet(QUIET)
        print(f"    quiet medians {quiet.medians}", flush=True)
        report.check("quiet answers", quiet.is_steady, quiet.answers)
        if not quiet.is_steady:
            return
        before = peak_resident(server.pid) if server.process else 0
        for kind, count in COSTLY.items():
            start = time.monotonic()
            outcomes = asyncio.run(_attack(server.url, kind, count, options.seed))
            duration = time.monotonic() - start
            faults = probe.faults(start, quiet)
            worst = {name: max((s.seconds for s in probe.since(start, name)), default=0.0) for name in NAMES}
            slowest = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in worst.items())
            wrong = [outcome for outcome in outcomes if not is_refused(outcome)]
            what = f"{count} x {kind} in {duration:.1f} s: the slowest probes"
            report.check(what, not faults, f"{slowest}; {faults[:3]}" if faults else slowest)
            report.check(f"{kind}: outcomes", not wrong, dict(outcomes))
        if server.process:
            grown = (peak_resident(server.pid) - before) / MIB
            what = f"growth of the HTTP process at its peak, below {MAX_GROWTH} MiB"
            report.check(what, grown < MAX_GROWTH, f"{grown:+.0f} MiB to {(before / MIB + grown):.0f} MiB")
        check_afterwards(server, report)


async def _attack(url: str, kind: str, count: int, seed: int) -> Counter[int | str]:
    """The outcomes of ``count`` attacks at the same time."""
    make, _ = KINDS[kind]
    attacks = [make(random.Random(f"{seed} {index}")) for index in range(count)]
    return Counter(await asyncio.gather(*(outcome_of(url, attack) for attack in attacks)))
