"""What the samples of a setting say together: tokens/s in two ways of counting, TPF, latency, score."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scripts.eval.samples import Sample

TOP = 10
"""Fastest answers whose mean is the paper's "Top-10 TPS"."""
METRICS = {
    "published_avg_tps": "mean of the answers' published tokens/s, the paper's Avg TPS",
    "published_max_tps": "published tokens/s of the fastest answer, the paper's Max TPS",
    "published_top10_tps": "mean of the published tokens/s of the ten fastest answers, the paper's Top-10 TPS",
    "lopa_tpf": "LoPA's TPF: opened positions of all answers / (their forward passes + 1 an answer)",
    "published_latency": "seconds of an answer after its first forward pass, mean",
    "user_avg_tps": "mean of the answers' visible tokens divided by seconds",
    "user_max_tps": "visible tokens divided by seconds, of the fastest answer",
    "user_top10_tps": "mean of the visible tokens divided by seconds, of the ten fastest answers",
    "user_tps": "visible tokens of all answers divided by seconds of all",
    "summed_tpf": "summed TPF: visible tokens of all answers / their forward passes",
    "user_latency": "seconds of an answer, mean",
    "score": "percent of the answers that are right",
    "outside_share": "share of the seconds outside forward passes and scores; empty with compiled steps",
    "host_share": "with compiled steps: share of the seconds in which the host writes inputs and reads results",
    "padded_share": "with compiled steps: share of the computed tokens that no branch needed",
    "eager_share": "with compiled steps: share of the forward passes that no compiled step could make",
    "pages": "KV pages of a request, mean",
    "model_tokens": "computed tokens of an answer, mean",
}
"""Metric -> what it is. Those that begin with "published", and "lopa_tpf", count as the published code does: a token is
a position that was opened, also one after the end of the answer, and time begins after the first forward pass.
Published tokens/s leave out the answers that are complete after the first pass; without any other answer they are None.
Metrics that begin with "user", and "summed_tpf", count what a user sees: tokens of the answer, and all the time from
the prompt to its end."""


class Counted(Protocol):
    """What is counted of an answer; see ``Sample``."""

    @property
    def visible_tokens(self) -> int: ...
    @property
    def opened_tokens(self) -> int: ...
    @property
    def num_forwards(self) -> int: ...


class AnswerCounts(NamedTuple):
    """What is counted of an answer whose time nobody measures."""

    visible_tokens: int
    opened_tokens: int
    num_forwards: int


def summed_tpf(answers: Sequence[Counted]) -> float:
    """Tokens before EOS of all answers divided by their forward passes. Tokens that a pass rejected do not count, and
    their passes do; long answers weigh more than in a mean of ratios."""
    forwards = sum(answer.num_forwards for answer in answers)
    return sum(answer.visible_tokens for answer in answers) / forwards if forwards else 0.0


def lopa_tpf(answers: Sequence[Counted]) -> float:
    """LoPA's definition for Dream (DiffuCoder's is the summed one): opened positions, also those after EOS, divided
    by forward passes with a closing round for each answer."""
    passes = sum(answer.num_forwards + 1 for answer in answers)
    return sum(answer.opened_tokens for answer in answers) / passes if passes else 0.0


def published_tps(samples: Iterable[Sample]) -> list[float]:
    """Tokens/s of each answer as the published code counts.

    Time begins after the first forward pass. Answers that are complete by then are left out: the microseconds that
    remain of their time would make millions of tokens/s.
    """
    timed = [sample for sample in samples if sample.num_forwards > 1]
    return [sample.opened_tokens / (sample.seconds - sample.first_seconds) for sample in timed]


def user_tps(samples: Iterable[Sample]) -> list[float]:
    """Tokens/s of each answer as a user sees them."""
    return [sample.visible_tokens / sample.seconds for sample in samples]


def measure(samples: Sequence[Sample]) -> dict[str, float | None]:
    """All metrics of one run of one setting."""
    found: dict[str, float | None] = {}
    for name, speeds in (("published", published_tps(samples)), ("user", user_tps(samples))):
        fastest_first = sorted(speeds, reverse=True)
        found[f"{name}_avg_tps"] = _mean(fastest_first)
        found[f"{name}_max_tps"] = max(fastest_first, default=None)
        found[f"{name}_top10_tps"] = _mean(fastest_first[:TOP])
    seconds = sum(sample.seconds for sample in samples)
    forwards = sum(sample.num_forwards for sample in samples)
    found["lopa_tpf"] = lopa_tpf(samples)
    found["published_latency"] = statistics.fmean(sample.seconds - sample.first_seconds for sample in samples)
    found["user_tps"] = sum(sample.visible_tokens for sample in samples) / seconds
    found["summed_tpf"] = summed_tpf(samples)
    found["user_latency"] = seconds / len(samples)
    found["score"] = 100 * statistics.fmean(sample.score for sample in samples)
    forward = _total(sample.forward_seconds for sample in samples)
    host = _total(sample.host_seconds for sample in samples)
    found["outside_share"] = None if forward is None else 1 - forward / seconds
    found["host_share"] = None if host is None else host / seconds
    padded = _total(sample.padded_tokens for sample in samples)
    graph_tokens = _total(sample.graph_tokens for sample in samples)
    found["padded_share"] = padded / graph_tokens if padded is not None and graph_tokens else None
    eager = _total(sample.eager_steps for sample in samples)
    # The first forward pass of an answer computes its prompt, and counts as neither.
    found["eager_share"] = None if eager is None else eager / max(1, forwards - len(samples))
    found["pages"] = statistics.fmean(sample.pages for sample in samples)
    found["model_tokens"] = statistics.fmean(sample.model_tokens for sample in samples)
    return {name: found[name] for name in METRICS}


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None if there are no values."""
    return statistics.fmean(values) if values else None


def _total(values: Iterable[float | None]) -> float | None:
    """The sum; None if any value is missing."""
    found = list(values)
    return None if None in found else sum(value for value in found if value is not None)


@dataclass(frozen=True)
class Spread:
    """A metric over several runs."""

    median: float
    low: float
    high: float


def over_runs(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """The median and the extremes of each metric over runs; None for a metric that a run does not have."""
    found: dict[str, Spread | None] = {}
    for name in METRICS:
        values = [value for run in runs if (value := run[name]) is not None]
        has_all = len(values) == len(runs)
        found[name] = Spread(statistics.median(values), min(values), max(values)) if has_all else None
    return found
