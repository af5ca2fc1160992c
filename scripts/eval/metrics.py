"""What the answers of a setting say together: TPF in two ways of counting, and tokens/s and latency as published."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

TOP = 10
"""Fastest answers whose mean is the paper's "Top-10 TPS"."""
METRICS = {
    "published_avg_tps": "mean of the answers' published tokens/s, the paper's Avg TPS",
    "published_max_tps": "published tokens/s of the fastest answer, the paper's Max TPS",
    "published_top10_tps": "mean of the published tokens/s of the ten fastest answers, the paper's Top-10 TPS",
    "published_latency": "seconds of an answer after its first forward pass, mean",
    "summed_tpf": "summed TPF: visible tokens of all answers / their forward passes",
    "lopa_tpf": "LoPA's TPF: opened positions of all answers / (their forward passes + 1 an answer)",
}
"""Metric -> what it is. Those that begin with "published", and "lopa_tpf", count as the published code does: a token is
a position that was opened, also one after the end of the answer, and time begins after the first forward pass."""


class AnswerCounts(NamedTuple):
    """What is counted of an answer."""

    visible_tokens: int
    """Before the token that ends it, as a reader gets them."""
    opened_tokens: int
    """Generated positions that were opened, with EOS and what follows it: what the published Dream code counts."""
    num_forwards: int
    seconds: float | None = None
    """After its first forward pass, by the clock on the wall; None: it was not decoded alone."""


def summed_tpf(answers: Sequence[AnswerCounts]) -> float:
    """Tokens before EOS of all answers divided by their forward passes. Tokens that a pass rejected do not count, and
    their passes do; long answers weigh more than in a mean of ratios."""
    forwards = sum(answer.num_forwards for answer in answers)
    return sum(answer.visible_tokens for answer in answers) / forwards if forwards else 0.0


def lopa_tpf(answers: Sequence[AnswerCounts]) -> float:
    """LoPA's definition for Dream (DiffuCoder's is the summed one): opened positions, also those after EOS, divided
    by forward passes with a closing round for each answer."""
    passes = sum(answer.num_forwards + 1 for answer in answers)
    return sum(answer.opened_tokens for answer in answers) / passes if passes else 0.0


def measure(answers: Sequence[AnswerCounts]) -> Mapping[str, float | None]:
    """All METRICS; None for those of time if any answer has none, and for speeds if all are complete after one pass.

    Of the speeds such answers are left out: the microseconds that remain of their time would make millions of tokens/s.
    """
    seconds = [answer.seconds for answer in answers if answer.seconds is not None]
    speeds: list[float] = []
    if len(seconds) == len(answers):
        timed = [answer for answer in answers if answer.num_forwards > 1 and answer.seconds]
        speeds = sorted((answer.opened_tokens / (answer.seconds or 1) for answer in timed), reverse=True)
    return {
        "published_avg_tps": statistics.fmean(speeds) if speeds else None,
        "published_max_tps": max(speeds, default=None),
        "published_top10_tps": statistics.fmean(speeds[:TOP]) if speeds else None,
        "published_latency": statistics.fmean(seconds) if answers and len(seconds) == len(answers) else None,
        "summed_tpf": summed_tpf(answers),
        "lopa_tpf": lopa_tpf(answers),
    }
