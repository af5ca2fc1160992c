"""The acceptance rules of examples/research_decodings against their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import Fill, RowResult
from tests import research
from tests.unit.test_acceptance import blocks, entropies, exact, fills, most, shares


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with research.registered():
        yield


def accepted(block: list[tuple[float, float]], **fields: Any) -> list[Fill]:
    """What the rule of a decoding lets through of one block."""
    return begin(SequenceStart([1], DecodingParams.of(**fields), 99, frozenset())).accept(fills(block))


@given(blocks, entropies)
def test_entropy_bound(block, gamma: float) -> None:
    def allows(first: list[Fill]) -> bool:
        values = exact([-fill.confidence for fill in first])
        return sum(values) - max(values) <= Fraction(gamma)

    found = accepted(block, decoding="entropy_bound", acceptance_gamma=gamma)
    assert found == most(fills(block), lambda fill: fill.confidence, allows)
    assert found or not block


@given(blocks, shares)
def test_frechet(block, delta: float) -> None:
    def allows(first: list[Fill]) -> bool:
        values = exact([fill.max_prob for fill in first])
        return max(Fraction(0), sum(values) - (len(values) - 1)) - (1 - min(values)) > Fraction(delta)

    found = accepted(block, decoding="frechet", acceptance_delta=delta)
    assert found == most(fills(block), lambda fill: fill.max_prob, allows)


def test_the_entropy_bound_gets_entropies() -> None:
    assert DecodingParams(decoding="entropy_bound").ranking == "neg_entropy"
    with pytest.raises(ParameterError, match=r'confidence: "margin" does not go with decoding "entropy_bound"'):
        DecodingParams(decoding="entropy_bound", confidence="margin")


def test_without_branches_they_extend_d2f() -> None:
    params = DecodingParams(decoding="frechet", num_branches=0, block_size=4, max_new_tokens=4)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    plan = strategy.plan()
    assert plan is not None
    probs = (0.9, 0.95, 0.3, 0.9)
    record = strategy.absorb(plan, [RowResult((5, 6, 7, 8), probs, probs)], 0, 0)
    assert [fill.position for fill in record.fills] == [1, 2, 4]
    assert len(strategy.branches) == 1
