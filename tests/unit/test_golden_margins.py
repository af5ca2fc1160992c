"""Where a decoding differs from a recorded one, and how near it was."""

from __future__ import annotations

import pytest

from tests.golden import first_difference


def decoded(fills, masked, winner=0, confidences=()):
    return {"winner": winner, "fills": fills, "masked": masked, "confidences": list(confidences)}


SAME = decoded([(3, 7)], [(3, 7, 0.9, 0.9)])


@pytest.mark.parametrize(
    ("ours", "theirs", "margin"),
    [
        (decoded([(4, 1)], [(4, 1, 0.501, 0.501)]), decoded([(4, 2)], [(4, 2, 0.502, 0.502)]), 0.001),  # another token
        (decoded([], []), decoded([(5, 1)], [(4, 1, 0.95, 0.95), (5, 1, 0.9004, 0.9004)]), 0.0004),  # the threshold
        (decoded([], [], 1), decoded([], [], 0, (-1.0, -1.01, -2.0)), 0.01),  # another winner
    ],
)
def test_the_margin_of_the_first_pass_that_differs(ours, theirs, margin: float) -> None:
    found = first_difference([SAME, ours], [SAME, theirs], tau_conf=0.9)
    assert found is not None
    assert found["pass"] == 1
    assert found["margin"] == pytest.approx(margin)


def test_equal_passes_and_missing_ones() -> None:
    assert first_difference([SAME], [SAME], 0.9) is None
    assert first_difference([SAME, SAME], [SAME], 0.9) == {"pass": 1, "margin": float("inf")}
