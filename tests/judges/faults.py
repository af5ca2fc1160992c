"""Judge: hostile requests are refused or cut off; good ones beside them get the text that they get without them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from tqdm import tqdm

from tests.judges import hostile_bodies, hostile_costs, hostile_traffic
from tests.judges.attack import KINDS, is_refused, outcome_of
from tests.judges.client import COMPLETIONS, Ask, ask, chat, connect, questions
from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, serving

MODULES = (hostile_bodies, hostile_costs, hostile_traffic)
"""Importing these modules fills ``KINDS``."""
ATTACKERS = 64
"""Hostile connections at the same time."""
GOOD_CLIENTS = 8
"""Good requests at the same time, as long as there are no hostile ones."""


@dataclass
class HostileOutcomes:
    """What came of the hostile requests."""

    outcomes: dict[str, Counter[int | str]] = field(default_factory=dict)
    """By kind: how often each outcome came, as ``outcome_of`` returns it."""
    wrong: dict[str, str] = field(default_factory=dict)
    """By kind: the first outcome that is wrong by ``is_refused``."""

    def count(self, kind: str, index: int, outcome: int | str) -> None:
        """Adds the outcome of the request with number ``index``."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        if not is_refused(outcome):
            self.wrong.setdefault(kind, f"request {index}: {outcome}")


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "faults.log") as server:
        good = _good_requests(options.good)
        hostile, alone, beside = asyncio.run(_send_all(server.url, options, good))
        total = Counter(outcome for counts in hostile.outcomes.values() for outcome in counts.elements())
        for kind, counts in sorted(hostile.outcomes.items()):
            print(f"    {kind:28s} {', '.join(f'{outcome}: {n}' for outcome, n in sorted(counts.items(), key=str))}")
        what = f"{total.total()} hostile requests of {len(hostile.outcomes)} kinds are refused or cut off"
        report.check(what, not hostile.wrong, hostile.wrong or dict(total))
        bad = [answer for answer in alone if not answer.startswith("200 done")]
        report.check(f"{len(good)} good requests alone", not bad, bad[:3] or "all answered")
        triples = zip(good, alone, beside, strict=True)
        disturbed = [
            f"{dict(request.body)}: {after} instead of {before}"
            for request, before, after in triples
            if before != after
        ]
        report.check(f"{len(good)} good requests beside hostile ones", not disturbed, disturbed[:3] or "the same text")
        check_afterwards(server, report)


async def _send_all(url: str, options: Options, good: list[Ask]) -> tuple[HostileOutcomes, list[str], list[str]]:
    """Sends the good requests alone, and once more beside the hostile ones.

    Returns:
        The outcomes of the hostile requests, and what the good requests got alone, and beside the hostile ones.
    """
    async with connect(url) as client:
        limit = asyncio.Semaphore(GOOD_CLIENTS)

        async def send_alone(request: Ask) -> str:
            async with limit:
                return await _outcome(client, request)

        alone = await asyncio.gather(*map(send_alone, good))
        beside: list[asyncio.Task[str]] = []

        def begin_good_requests(share: float) -> None:
            # Half of them at once and the others spread over the hostile ones, so that good ones run all the time.
            while len(beside) < len(good) and len(beside) <= len(good) * (1 + share) / 2:
                beside.append(asyncio.create_task(_outcome(client, good[len(beside)])))

        hostile = await _send_hostile(url, options, begin_good_requests)
        begin_good_requests(1.0)
        return hostile, alone, await asyncio.gather(*beside)


async def _send_hostile(url: str, options: Options, progress: Callable[[float], None]) -> HostileOutcomes:
    """Sends all hostile requests; ``progress`` is called with the share of them that has begun."""
    hostile, plan = HostileOutcomes(), _plan(options.seed, options.hostile)
    waiting = iter(enumerate(plan))

    async def attacker() -> None:
        for index, kind in waiting:
            progress(index / len(plan))
            make, _ = KINDS[kind]
            attack = make(random.Random(f"{options.seed} {index}"))
            hostile.count(kind, index, await outcome_of(url, attack))
            bar.update()

    with tqdm(total=len(plan), desc="hostile requests", disable=None) as bar:
        await asyncio.gather(*(attacker() for _ in range(ATTACKERS)))
    return hostile


def _plan(seed: int, count: int) -> list[str]:
    """The kind of each hostile request: all kinds at least once, the others by weight, in random order."""
    rng, names = random.Random(seed), list(KINDS)
    plan = [*names, *rng.choices(names, [weight for _, weight in KINDS.values()], k=max(0, count - len(names)))]
    rng.shuffle(plan)
    return plan


async def _outcome(client: httpx.AsyncClient, request: Ask) -> str:
    """What a good request's client sees, without what differs between any two answers."""
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
