"""The acceptance rules against their formulas, and when a block is forced to fill all the same."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.acceptance import ACCEPTANCES, RULES, acceptance_rule
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import Fill, RowResult

# Multiples of 1/64, so that the sums of the rules are exact and ties are common.
shares = st.integers(0, 64).map(lambda n: n / 64)
entropies = st.integers(0, 200).map(lambda n: n / 64)
blocks = st.lists(st.tuples(shares, entropies), max_size=12)


def fills(block: list[tuple[float, float]]) -> list[Fill]:
    return [Fill(10 + at, 1, prob, -entropy) for at, (prob, entropy) in enumerate(block)]


def most(block: list[Fill], by: Callable[[Fill], float], allows: Callable[[list[Fill]], bool]) -> list[Fill]:
    """The longest beginning of the ranking that a formula allows, whatever it says of shorter ones."""
    ranked = sorted(block, key=lambda fill: (-by(fill), fill.position))
    allowed = [n for n in range(1, len(ranked) + 1) if allows(ranked[:n])]
    return sorted(ranked[: max(allowed, default=0)], key=lambda fill: fill.position)


def exact(values: list[float]) -> list[Fraction]:
    return [Fraction(value) for value in values]


@given(blocks, shares)
def test_threshold(block, tau: float) -> None:
    rule = acceptance_rule(DecodingParams(tau_conf=tau))
    assert rule(fills(block)) == [fill for fill in fills(block) if fill.max_prob > tau]


@given(blocks, st.integers(0, 128).map(lambda n: n / 32))
def test_factor(block, factor: float) -> None:
    def allows(first: list[Fill]) -> bool:
        return (len(first) + 1) * (1 - min(exact([fill.max_prob for fill in first]))) < Fraction(factor)

    rule = acceptance_rule(DecodingParams(acceptance="factor", acceptance_factor=factor))
    assert rule(fills(block)) == most(fills(block), lambda fill: fill.max_prob, allows)


@given(blocks, st.integers(0, 200).map(lambda n: n / 64))
def test_entropy(block, bound: float) -> None:
    rule = acceptance_rule(DecodingParams(acceptance="entropy", confidence="neg_entropy", max_entropy=bound))
    assert rule(fills(block)) == [fill for fill in fills(block) if -fill.confidence <= bound]


def test_every_rule_has_a_name() -> None:
    assert tuple(RULES) == ACCEPTANCES


@pytest.mark.parametrize("tau_act", [0.0, 1.0])
def test_only_a_fully_activated_block_fills_what_no_rule_accepts(tau_act: float) -> None:
    params = DecodingParams(
        decoding="d2f", block_size=2, max_new_tokens=4, tau_add=0.5, tau_act=tau_act, acceptance="factor"
    )
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    for probs in ((0.9, 0.2), (0.1, 0.4, 0.3)):
        plan = strategy.plan()
        assert plan is not None
        record = strategy.absorb(plan, [RowResult((1,) * len(probs), probs, probs)], 0, 0)
    # 2 x (1 - 0.4) exceeds the factor 1 in both blocks; each that is fully activated falls back on its best position.
    assert [fill.position for fill in record.fills] == ([2, 3] if tau_act == 0.0 else [2])
    assert record.fallbacks == len(record.fills)
