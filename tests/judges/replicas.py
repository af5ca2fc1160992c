"""Judge: of three replicas, engines, ranks, actors, nodes and the ingress end under load, and no request is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict

from tests.judges.report import Options, Report
from tests.replicas.deployment import FAULTS, Outcomes, answers, deployed, survive


def judge(options: Options, report: Report) -> None:
    dice = random.Random(options.seed)
    found: defaultdict[str, list[Outcomes]] = defaultdict(list)
    with deployed(3, branch_parallel_size=2) as deployment:
        expected = asyncio.run(answers(deployment.url))
        for run in range(options.runs):
            fault = FAULTS[run % len(FAULTS)]
            outcomes = survive(deployment, fault, dice, expected)
            found[fault].append(outcomes)
            for text in outcomes.wrong:
                report.check(f"run {run}, {fault}", False, text)
            print(f"  run {run}, {fault}: {dict(outcomes.counts)}, slowest {outcomes.slowest:.1f} s", flush=True)
    for fault, runs in found.items():
        counts = sum((outcomes.counts for outcomes in runs), Counter())
        wrong = sum(len(outcomes.wrong) for outcomes in runs)
        summary = f"{dict(counts)}, slowest {max(outcomes.slowest for outcomes in runs):.1f} s"
        report.check(f"{fault}, {len(runs)} times", wrong == 0 and counts["ok"] > 0, summary)
