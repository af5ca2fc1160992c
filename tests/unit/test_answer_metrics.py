"""What is counted of answers: tokens per second and per forward pass, as published and as a reader sees them."""

from __future__ import annotations

import pytest

from scripts.eval.metrics import METRICS, AnswerCounts, lopa_tpf, measure, summed_tpf

FAST, SLOW = AnswerCounts(30, 64, 7, 2.0), AnswerCounts(10, 64, 7, 4.0)


def test_tokens_per_second_are_counted_as_published() -> None:
    found = measure([FAST, SLOW])
    assert list(found) == list(METRICS)
    assert found["published_avg_tps"] == pytest.approx((64 / 2 + 64 / 4) / 2)
    assert found["published_max_tps"] == 32
    assert found["published_top10_tps"] == 24
    assert found["published_latency"] == 3
    assert found["lopa_tpf"] == 128 / 16
    assert found["summed_tpf"] == 40 / 14


def test_the_top_10_are_the_fastest() -> None:
    answers = [AnswerCounts(1, 10, 2, seconds) for seconds in (1.0, *[0.5] * 10)]
    assert measure(answers)["published_top10_tps"] == 20


def test_summed_tpf_is_no_mean_of_ratios_and_counts_no_token_after_the_end() -> None:
    answers = [AnswerCounts(10, 64, 10), AnswerCounts(30, 64, 5)]
    assert summed_tpf(answers) == 40 / 15
    assert lopa_tpf(answers) == 128 / 17
    assert summed_tpf([]) == lopa_tpf([]) == 0


def test_speeds_leave_out_answers_of_one_pass_and_need_all_times() -> None:
    at_once = AnswerCounts(5, 8, 1, 1e-6)
    assert measure([FAST, at_once])["published_max_tps"] == 32
    assert measure([at_once])["published_max_tps"] is None
    untimed = measure([FAST, AnswerCounts(5, 8, 3)])
    assert [name for name, value in untimed.items() if value is None] == [
        "published_avg_tps", "published_max_tps", "published_top10_tps", "published_latency",
    ]  # fmt: skip
