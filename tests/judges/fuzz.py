"""Judge: random requests, odd, large and many at once, are answered or refused, and delay no small request."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, Verbosity, assume, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from tests.judges.answers import check_stream, check_whole, refusal
from tests.judges.client import CHAT, COMPLETIONS, connect
from tests.judges.probe import NAMES, probing
from tests.judges.report import Options, Report
from tests.judges.server import check_afterwards, serving

QUIET = 2.0
"""Seconds of the measurement without other clients."""
BATCH = 20
"""Examples between two looks at the clock."""
MAX_WORK = 64
"""Most tokens that one example may have generated: the engine's time is shared fairly, but it is not endless."""
MAX_BODY = 16 * 2**20
"""Bytes of the largest body: twice what the server takes. It cuts off what is much larger."""
ANSWER_TIMEOUT = 120.0
"""Seconds in which every request must be answered."""
GREAT = st.sampled_from([0, 1, 1, 2, 3, 17, 100, 100, 1_000, 1_000, 20_000, 150_000])
"""How often something small is repeated to make something large."""


@dataclass(frozen=True)
class Repeated:
    """A large value that is short to write down: hypothesis prints it, and shrinks it, as its parts."""

    part: Any
    times: int

    def value(self) -> Any:
        """The part, a text or a list, so many times."""
        return self.part * self.times


@dataclass(frozen=True)
class Example:
    """Equal requests that are sent at the same time."""

    route: str
    fields: dict[str, Any]
    copies: int

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {name: value.value() if isinstance(value, Repeated) else value for name, value in self.fields.items()}

    def work(self) -> int:
        """Most tokens that are generated for all copies."""
        body = self.body()
        prompt: Any = body.get("prompt")
        is_list_of_prompts = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        num_prompts = len(prompt) if is_list_of_prompts else 1
        max_tokens = int(body.get("max_tokens", body.get("max_output_tokens", 0)))
        return self.copies * num_prompts * body.get("n", 1) * max_tokens


@dataclass
class Outcomes:
    """What came of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    """Seconds of the slowest example, and what it was."""
    fault: str | None = None
    """The last wrong answer, and to what; None if there was none."""


# ---- what is sent ----------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["a", "Tom has 12 apples. ", "é", "日本", "🙂", "\n", " ", "<|im_end|>", '"\\', "[{:"]
) | st.text(max_size=8)
TOKENS = st.integers(-1, 700)


def _repeated(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Repeated]:
    return st.builds(Repeated, parts, GREAT)


def _lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Repeated]:
    return _repeated(st.lists(items, min_size=1, max_size=4))


ODD = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
NUMBERS = st.integers(-1, 5) | st.floats(-1, 3, allow_nan=False) | ODD
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 16),
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": NUMBERS,
    "min_tokens": st.integers(0, 4),
    "seed": st.integers(-(2**63) - 1, 2**63),
    "stop": TEXTS | _repeated(TEXTS) | _lists(TEXTS),
    "stop_token_ids": _lists(TOKENS) | st.integers(0, 3).map(lambda k: list(range(10**k * 50))),
    "eos_token_id": TOKENS | _lists(TOKENS),
    "logit_bias": st.dictionaries(st.integers(0, 700).map(str), NUMBERS, max_size=4),
    "num_branches": st.integers(0, 16),
    "block_size": st.sampled_from([1, 8, 32, 4096]),
    "stream": st.booleans(),
    "metadata": st.recursive(
        ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    "user": _repeated(TEXTS),
    "unknown": ODD,
}
PROMPTS = TEXTS | _repeated(TEXTS) | _lists(TOKENS) | _lists(TEXTS) | _lists(st.lists(TOKENS, max_size=3)) | ODD
MESSAGES = _lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "king"]), "content": TEXTS})
)
BODIES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    COMPLETIONS: st.fixed_dictionaries(
        {"prompt": PROMPTS, "max_tokens": st.integers(0, 4)},
        optional={**COMMON, "logprobs": NUMBERS, "echo": st.booleans()},
    ),
    CHAT: st.fixed_dictionaries(
        {"messages": MESSAGES, "max_tokens": st.integers(0, 4)}, optional={**COMMON, "logprobs": st.booleans()}
    ),
    "/v1/responses": st.fixed_dictionaries(
        {"input": TEXTS | _repeated(TEXTS) | MESSAGES | ODD, "max_output_tokens": st.integers(0, 4)},
        optional={"instructions": _repeated(TEXTS), "temperature": NUMBERS, "stream": st.booleans(), "unknown": ODD},
    ),
    "/tokenize": st.fixed_dictionaries({}, optional={"prompt": PROMPTS, "messages": MESSAGES, "unknown": ODD}),
    "/detokenize": st.fixed_dictionaries({"tokens": _lists(TOKENS)}),
    "/abort_request": st.fixed_dictionaries({"request_id": TEXTS | _repeated(TEXTS)}),
}


def examples() -> st.SearchStrategy[Example]:
    """Requests whose work is no more than ``MAX_WORK``."""
    any_example = st.sampled_from(sorted(BODIES)).flatmap(
        lambda route: st.builds(Example, st.just(route), BODIES[route], st.integers(1, 6))
    )
    return any_example.filter(lambda example: example.work() <= MAX_WORK)


# ---- sending ---------------------------------------------------------------------------------------------------------


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "fuzz.log") as server, probing(server.url) as probe:
        quiet = probe.quiet(QUIET)
        report.check("quiet answers", quiet.is_steady, quiet.answers)
        if not quiet.is_steady:
            return
        start, outcomes = time.monotonic(), Outcomes()
        fault = _fuzz(server.url, options, outcomes)
        faults = probe.faults(start, quiet)
        samples = [sample for name in NAMES for sample in probe.since(start, name)]
        slowest = {name: max((s.seconds for s in samples if s.name == name), default=0.0) for name in NAMES}
        report.check("requests are answered or refused", fault is None, fault or dict(outcomes.statuses))
        print(f"    the slowest example took {outcomes.slowest[0]:.2f} s: {outcomes.slowest[1]:.300s}")
        shown = {name: f"{slowest[name]:.2f} s of {quiet.allowed(name):.2f} s" for name in NAMES}
        what = f"{len(samples)} probes beside them are quick and as ever"
        report.check(what, not faults, f"{shown} {faults[:5]}" if faults else shown)
        check_afterwards(server, report)


def _fuzz(url: str, options: Options, outcomes: Outcomes) -> str | None:
    """Sends examples until the time is over; returns the simplest one that was answered wrongly, None if none was."""
    end, batch = time.monotonic() + options.fuzz_seconds, 0
    while time.monotonic() < end:
        try:
            _test(url, outcomes, end, 1000 * options.seed + batch)()
        except AssertionError as error:
            return "; ".join([str(error), *getattr(error, "__notes__", ())])
        except Flaky:
            # A server under load need not answer twice alike.
            return f"{outcomes.fault}; not when it was sent again"
        batch += 1
    return None


def _test(url: str, outcomes: Outcomes, end: float, number: int) -> Callable[[], None]:
    """A test of hypothesis that sends ``BATCH`` examples, or fewer if the time is over.

    After a wrong answer the time does not count: hypothesis looks for the simplest example for up to five minutes.
    """

    @seed(number)
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(example=examples())
    def test(example: Example) -> None:
        if outcomes.fault is None and time.monotonic() > end:
            return
        body = json.dumps(example.body()).encode()
        assume(len(body) <= MAX_BODY)
        start = time.monotonic()
        statuses = asyncio.run(_send(url, example, body))
        outcomes.slowest = max(outcomes.slowest, (time.monotonic() - start, str(example)))
        outcomes.statuses.update(statuses)
        wrong = [status for status in statuses if status[0] not in "24" and status != "503 queue_full"]
        if wrong:
            outcomes.fault = f"{wrong[0]} for {str(example):.1000s}"
        assert not wrong, outcomes.fault

    return test


async def _send(url: str, example: Example, body: bytes) -> list[str]:
    """What each copy of an example gets, as ``_status`` returns it."""
    async with connect(url, ANSWER_TIMEOUT) as client:
        return await asyncio.gather(*(_status(client, example, body) for _ in range(example.copies)))


async def _status(client: httpx.AsyncClient, example: Example, body: bytes) -> str:
    """Sends an example once.

    Returns:
        "200" for a complete answer, the status and the code for a refusal. Otherwise, in words, what is wrong: there is
        no answer, it breaks off, it holds an error in spite of status 200, or it is not in the form of this API.
    """
    try:
        response = await client.post(example.route, content=body, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    try:
        if response.status_code != 200:
            return f"{response.status_code} {refusal(response.content).get('code')}"
        if example.fields.get("stream"):
            check_stream(response.text)
        else:
            check_whole(response.content)
    except ValueError as error:
        return f"wrong answer with status {response.status_code}: {error}"
    return "200"
