"""The block state machine and the fill rule, on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.blocks import Block, BlockState, Branch, threshold_count
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import Fill, RowResult, SequencePlan
from tests.answers import final_tokens

MASK, EOS = 99, 7


def results(plan: SequencePlan, confidence: float = 0.5, token: int = 1) -> list[RowResult]:
    return [
        RowResult((token,) * len(r.masked), (confidence,) * len(r.masked), (confidence,) * len(r.masked))
        for r in plan.rows
    ]


def params(**kwargs) -> DecodingParams:
    return DecodingParams(**{"decoding": "d2f", "block_size": 4, "max_new_tokens": 12, **kwargs})


def planned(strategy) -> SequencePlan:
    plan = strategy.plan()
    assert plan is not None
    return plan


@given(st.floats(0, 1), st.integers(1, 64))
def test_threshold_count_is_the_published_comparison(fraction: float, length: int) -> None:
    count = threshold_count(fraction, length)
    assert all((filled / length >= fraction) == (filled >= count) for filled in range(length + 1))


def test_round_one_is_prefill_and_first_step_in_one() -> None:
    plan = planned(begin(SequenceStart([1, 2, 3], params(), MASK, frozenset())))
    assert (plan.start, plan.num_new) == (0, 3)
    assert plan.rows[0].tokens == (1, 2, 3, MASK, MASK, MASK, MASK)
    assert plan.rows[0].entry_ends == (3, 7)
    assert plan.rows[0].masked == (3, 4, 5, 6)


def test_full_attention_is_one_entry() -> None:
    plan = planned(begin(SequenceStart([1, 2, 3], params(window_attention="full"), MASK, frozenset())))
    assert plan.rows[0].entry_ends == (7,)
    assert plan.winner_commits


def test_fallback_takes_the_most_confident_then_the_earliest() -> None:
    strategy = begin(SequenceStart([1], params(), MASK, frozenset()))
    record = strategy.absorb(planned(strategy), results(planned(strategy)), 0, 0)
    assert [fill.position for fill in record.fills] == [1]
    assert record.fallbacks == 1


def test_a_block_that_is_not_fully_activated_is_not_forced() -> None:
    strategy = begin(SequenceStart([1], params(tau_add=0.25), MASK, frozenset()))
    strategy.absorb(planned(strategy), results(planned(strategy)), 0, 0)
    plan = planned(strategy)
    assert len(plan.rows[0].masked) == 3 + 4
    record = strategy.absorb(plan, results(plan), 0, 0)
    assert [fill.position for fill in record.fills] == [2]


def test_tau_conf_is_strict_and_compared_in_float32() -> None:
    just = DecodingParams(decoding="d2f", block_size=4, max_new_tokens=4, tau_conf=0.9)
    at = 0.8999999761581421  # float32(0.9)
    strategy = begin(SequenceStart([1], just, MASK, frozenset()))
    record = strategy.absorb(planned(strategy), results(planned(strategy), at), 0, 0)
    assert (len(record.fills), record.fallbacks) == (1, 1)
    strategy = begin(SequenceStart([1], just, MASK, frozenset()))
    record = strategy.absorb(planned(strategy), results(planned(strategy), 0.9000000357627869), 0, 0)
    assert (len(record.fills), record.fallbacks) == (4, 0)


def test_last_block_is_cut_to_max_new_tokens() -> None:
    strategy = begin(SequenceStart([1], params(max_new_tokens=6), MASK, frozenset()))
    while (plan := strategy.plan()) is not None:
        strategy.absorb(plan, results(plan, 0.95), 0, 0)
    assert [block.length for block in strategy.answer.blocks] == [1, 4, 2]
    assert final_tokens(strategy) == [1] * 6


def test_eos_stops_block_adding_and_ends_the_visible_text() -> None:
    strategy = begin(SequenceStart([1], params(), MASK, frozenset([EOS])))
    plan = planned(strategy)
    row = RowResult((1, EOS, 1, 1), (0.95, 0.95, 0.2, 0.2), (0.95, 0.95, 0.2, 0.2))
    strategy.absorb(plan, [row], 0, 0)
    assert strategy.plan() is None
    assert final_tokens(strategy) == [1]
    assert strategy.final()[1] == EOS


def test_a_lookahead_branch_without_masks_has_won() -> None:
    lopa = DecodingParams(block_size=4, max_new_tokens=4, num_branches=2)
    strategy = begin(SequenceStart([1], lopa, MASK, frozenset()))
    plan = planned(strategy)
    row = RowResult((1, 2, 3, 4), (0.95, 0.95, 0.95, 0.2), (0.95, 0.95, 0.95, 0.2))
    strategy.absorb(plan, [row], 0, 0)
    assert strategy.plan() is None
    assert final_tokens(strategy) == [1, 2, 3, 4]
    assert strategy.num_forwards == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_max_active_blocks_bounds_the_window(limit: int) -> None:
    strategy = begin(SequenceStart([1], params(max_active_blocks=limit, max_new_tokens=32), MASK, frozenset()))
    seen = set()
    while (plan := strategy.plan()) is not None:
        blocks = strategy.branches[-1].blocks
        first = next(i for i, block in enumerate(blocks) if block.masks)
        seen.add(len(blocks) - first)
        strategy.absorb(plan, results(plan), 0, 0)
    assert max(seen) == limit


def test_a_block_finished_by_a_lookahead_alone_waits_a_round() -> None:
    blocks = Block(0, 1, 0, BlockState.IN_CACHE), Block(1, 5, 1, activated=True)
    anchor = Branch((1, 2, 3, MASK), blocks, first=1, probs=(0.5,) * 4)
    branch = anchor.finish_blocks().as_lookahead([Fill(4, 1, 0.9, 0.9)], frozenset())
    states = [branch.blocks[1].state, branch.as_anchor().finish_blocks().blocks[1].state]
    assert states == [BlockState.ACTIVE, BlockState.TO_CACHE]
    assert anchor.blocks == blocks


def test_a_finished_block_waits_for_the_one_before() -> None:
    blocks = Block(0, 1, 0, BlockState.IN_CACHE), Block(1, 3, 1), Block(3, 5, 0)
    branch = Branch((1, MASK, 1, 1), blocks, first=1, probs=(0.5,) * 4).finish_blocks()
    assert branch.blocks[2].state is BlockState.ACTIVE
    branch = branch.fill([Fill(2, 1, 0.9, 0.9)], frozenset()).finish_blocks()
    assert [block.state for block in branch.blocks[1:]] == [BlockState.TO_CACHE] * 2


def test_masks_that_come_back_take_a_branchs_own_tokens_with_them() -> None:
    strategy = begin(SequenceStart([1, 2], params(), MASK, frozenset({EOS})))
    fills = [Fill(position, token, 0.5, 0.5) for position, token in ((2, 4), (3, EOS), (5, 6))]
    branch = strategy.anchor.as_lookahead(fills, frozenset({EOS}))
    assert branch.eos
    branch = branch.mask_again(1, MASK, frozenset({EOS}))
    assert branch.tokens == (4, MASK, MASK, MASK)
    assert (branch.own_fills, branch.masks, branch.eos) == ((fills[0],), 3, False)
