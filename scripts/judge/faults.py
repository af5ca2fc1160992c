"""Judge: hostile requests are refused or cut off; good ones beside them get the text that they get on a quiet day."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
from tqdm import tqdm

from scripts.judge import hostile_bodies, hostile_traffic
from scripts.judge.attack import CLOSED, KINDS, LEFT, play
from scripts.judge.client import COMPLETIONS, Ask, ask, chat, connect, questions
from scripts.judge.report import Options, Report
from scripts.judge.server import serving

MODULES = (hostile_bodies, hostile_traffic)
"""Importing them fills ``KINDS``."""
ATTACKERS = 64
"""Hostile connections at the same time."""
QUIET = 8
"""Good requests at the same time in the quiet run."""


@dataclass
class Storm:
    """What came of the hostile requests: outcomes by kind, and the first of each kind that went wrong."""

    outcomes: dict[str, Counter[int | str]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def count(self, kind: str, index: int, outcome: int | str) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        if not (outcome in (LEFT, CLOSED) or isinstance(outcome, int) and 400 <= outcome < 500):
            self.wrong.setdefault(kind, f"request {index}: {outcome}")


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "faults.log") as server:
        good = _good_requests(options.good)
        storm, quiet, loud = asyncio.run(_judge(server.url, options, good))
        total = Counter(outcome for counts in storm.outcomes.values() for outcome in counts.elements())
        for kind, counts in sorted(storm.outcomes.items()):
            print(f"    {kind:28s} {', '.join(f'{outcome}: {n}' for outcome, n in sorted(counts.items(), key=str))}")
        what = f"{total.total()} hostile requests of {len(storm.outcomes)} kinds get a 4xx or a closed connection"
        report.check(what, not storm.wrong, storm.wrong or dict(total))
        bad = [answer for answer in quiet if not answer.startswith("200 done")]
        report.check(f"{len(good)} good requests on a quiet day", not bad, bad[:3] or "all answered")
        pairs = zip(good, quiet, loud, strict=True)
        disturbed = [
            f"{dict(ask.body)}: {after} instead of {before}" for ask, before, after in pairs if before != after
        ]
        report.check(f"{len(good)} good requests in the storm", not disturbed, disturbed[:3] or "the same text")
        report.check("/health afterwards", (status := httpx.get(f"{server.url}/health").status_code) == 200, status)
        report.check("pages in use afterwards", (pages := server.await_no_pages()) == 0, pages)
        report.check("tracebacks in the server's log", not server.tracebacks(), server.tracebacks())


async def _judge(url: str, options: Options, good: list[Ask]) -> tuple[Storm, list[str], list[str]]:
    """The storm, and what the good requests got before it and in it."""
    async with connect(url) as client:
        seats = asyncio.Semaphore(QUIET)

        async def quietly(request: Ask) -> str:
            async with seats:
                return await _outcome(client, request)

        quiet = await asyncio.gather(*map(quietly, good))
        loud: list[asyncio.Task[str]] = []

        def begin(share: float) -> None:
            # Half of them at once and the others spread over the storm, so that there are good ones in all of it.
            while len(loud) < len(good) and len(loud) <= len(good) * (1 + share) / 2:
                loud.append(asyncio.create_task(_outcome(client, good[len(loud)])))

        storm = await _storm(url, options, begin)
        begin(1.0)
        return storm, quiet, await asyncio.gather(*loud)


async def _storm(url: str, options: Options, progress: Callable[[float], None]) -> Storm:
    """Sends all hostile requests; ``progress`` gets the share of them that has begun."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    assert host is not None
    assert port is not None
    storm, plan = Storm(), _plan(options.seed, options.hostile)
    waiting = iter(enumerate(plan))

    async def attacker() -> None:
        for index, kind in waiting:
            progress(index / len(plan))
            attack = KINDS[kind][0](random.Random(f"{options.seed} {index}"))
            try:
                outcome = await play(host, port, attack)
            except (TimeoutError, ValueError, LookupError, OSError, asyncio.LimitOverrunError) as error:
                outcome = f"{type(error).__name__}: {error}"
            storm.count(kind, index, outcome)
            bar.update()

    with tqdm(total=len(plan), desc="hostile requests", disable=None) as bar:
        await asyncio.gather(*(attacker() for _ in range(ATTACKERS)))
    return storm


def _plan(seed: int, count: int) -> list[str]:
    """Names of kinds by their weights, every one at least once, in random order."""
    rng, names = random.Random(seed), list(KINDS)
    plan = [*names, *rng.choices(names, [weight for _, weight in KINDS.values()], k=max(0, count - len(names)))]
    rng.shuffle(plan)
    return plan


async def _outcome(client: httpx.AsyncClient, request: Ask) -> str:
    """All that a good request's client sees, without what differs between any two answers."""
    try:
        answer = await ask(client, request)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    end = "done" if answer.ok else f"not done, {answer.error}"
    return f"{answer.status} {end} {answer.finish_reasons} {answer.texts}"


def _good_requests(count: int) -> list[Ask]:
    """Chat and completions, streamed and not, greedy and sampled, with and without stop strings."""
    found, asked = [], questions()
    for index in range(count):
        question = asked[index % len(asked)]
        fields: dict[str, object] = {"stream": index % 2 == 0, "max_tokens": 96}
        if index % 3 == 0:
            fields |= {"temperature": 0.8, "seed": index}
        if index % 5 == 0:
            fields |= {"stop": ["####", "never there"]}
        completion = Ask(COMPLETIONS, {"prompt": question, **fields})
        found.append(completion if index % 4 == 0 else chat(question, **fields))
    return found
