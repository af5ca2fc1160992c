"""Strategies that decode a whole canvas: what they ask of a pass, and what they fill."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, ParameterError, decodings
from lopa_ascend.decode import begin, register_decoding
from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.lengths import LengthSearch, Measuring
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.decode.vanilla import Vanilla
from lopa_ascend.families import FAMILIES
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.types import DREAM, GappedText, RowResult, SequencePlan, StepRecord
from tests.answers import final_tokens

MASK = 99
EOS = 7


def start(prompt: int = 3, **values: Any) -> Strategy:
    fields: dict[str, Any] = {"decoding": "parallel", "block_size": 4, "max_new_tokens": 10, **values}
    return begin(SequenceStart([1] * prompt, DecodingParams(**fields), MASK, frozenset([EOS])))


def one_pass(
    strategy: Strategy, probs: dict[int, float] | None = None, token: int = 5
) -> tuple[SequencePlan, StepRecord]:
    """A pass in which every position predicts ``token`` with 0.1, or with what ``probs`` says by position."""
    plan = strategy.plan()
    assert plan is not None
    values = tuple((probs or {}).get(q, 0.1) for q in plan.rows[0].masked)
    return plan, strategy.absorb(plan, [RowResult((token,) * len(values), values, values)], 0, 0)


def test_parallel_decoding_computes_everything_and_fills_block_after_block() -> None:
    strategy = start()
    plan, record = one_pass(strategy, {3: 0.95, 5: 0.95, 8: 0.99})
    row = plan.rows[0]
    assert (plan.start, plan.num_new, plan.prefix_length, row.start, row.end, row.entry_ends) == (0, 0, 0, 0, 13, (13,))
    assert row.tokens == (1,) * 3 + (MASK,) * 10
    assert row.masked == (3, 4, 5, 6)
    assert [fill.position for fill in record.fills] == [3, 5]
    assert strategy.num_counted == 0
    plan, record = one_pass(strategy, {6: 0.5, 7: 0.99})
    assert plan.rows[0].masked == (4, 6)
    assert ([fill.position for fill in record.fills], record.fallbacks) == ([6], 1)
    one_pass(strategy)
    plan, record = one_pass(strategy, {7: 0.95, 8: 0.95, 9: 0.95, 10: 0.95})
    assert (plan.rows[0].masked, len(record.fills), record.fallbacks) == ((7, 8, 9, 10), 4, 0)
    assert strategy.num_counted == 8
    assert strategy.num_committed == 0


LLADA = FAMILIES["llada"].properties


def test_a_schedule_says_how_many_positions_a_pass_fills() -> None:
    """10 positions in 4 passes are 3, 3, 2 and 2, whatever a rule accepted before."""
    strategy = start(block_size=10, denoising_steps=4, tau_conf=1.0)
    assert [len(one_pass(strategy)[1].fills) for _ in range(4)] == [3, 3, 2, 2]
    strategy = start(block_size=10, denoising_steps=4, tau_conf=0.9)
    assert [len(one_pass(strategy, dict.fromkeys(range(3, 7), 0.95))[1].fills) for _ in range(4)] == [4, 2, 2, 2]
    strategy = start(block_size=4, denoising_steps=8, tau_conf=1.0)  # a pass fills something
    assert [len(one_pass(strategy)[1].fills) for _ in range(10)] == [1] * 10
    assert strategy.plan() is None
    # With shifted logits the first pass of a block fills its first position alone; the next one makes up for it.
    strategy = start(decoding="fast_dllm", block_size=10, denoising_steps=2, tau_conf=1.0)
    assert [len(one_pass(strategy)[1].fills) for _ in range(2)] == [1, 9]


def test_a_window_of_several_blocks_opens_as_they_are_filled() -> None:
    strategy = start(max_active_blocks=3, tau_add=0.5, max_new_tokens=16)
    assert one_pass(strategy, {3: 0.95})[0].rows[0].masked == (3, 4, 5, 6)
    plan, record = one_pass(strategy, {9: 0.95})
    assert (plan.rows[0].masked, [fill.position for fill in record.fills]) == ((4, 5, 6), [4])
    plan, record = one_pass(strategy, {9: 0.95, 10: 0.95})
    assert plan.rows[0].masked == (5, 6, 7, 8, 9, 10)
    assert ([fill.position for fill in record.fills], record.fallbacks) == ([5, 9, 10], 1)  # the first block goes on
    assert one_pass(strategy)[0].rows[0].masked == (6, 7, 8, 11, 12, 13, 14)


def test_a_pass_for_llada_fills_the_best_position_of_its_window() -> None:
    for properties, filled in ((DREAM, [3]), (LLADA, [3, 8])):
        params = DecodingParams(decoding="parallel", block_size=4, tau_add=0.0, max_active_blocks=2, max_new_tokens=8)
        strategy = begin(SequenceStart([1] * 3, params, MASK, frozenset([EOS]), properties=properties))
        assert [fill.position for fill in one_pass(strategy, {8: 0.5})[1].fills] == filled


def test_a_window_of_several_blocks_stops_at_an_end() -> None:
    strategy = start(max_active_blocks=2, tau_add=0.0)
    _, record = one_pass(strategy, {5: 0.95, 8: 0.95}, token=EOS)
    assert [fill.position for fill in record.fills] == [5, 8]
    assert strategy.anchor.tokens == (MASK, MASK, *[EOS] * 8)
    assert (strategy.anchor.masks, strategy.plan() is None) == (2, False)
    one_pass(strategy, {3: 0.95, 4: 0.95})
    assert (strategy.plan(), final_tokens(strategy)) == (None, [5, 5])
    for fields in ({"max_active_blocks": 1}, {"max_active_blocks": 2, "finish_at_eos": False}):
        strategy = start(tau_add=0.0, **fields)
        one_pass(strategy, {5: 0.95}, token=EOS)
        assert strategy.anchor.tokens[3:] == (MASK,) * 7


def test_tokens_that_end_the_answer_can_be_filled_last() -> None:
    """LLaDA's confidence_eos_eot_inf: their confidence counts as 0, the others' stay."""
    probs = (0.99, 0.2, 0.98, 0.95)
    for fields, passes in (({}, [[3, 5, 6], [4]]), ({"eos_last": True}, [[6], [4], [3], [5]])):
        strategy, filled = start(max_new_tokens=4, finish_at_eos=False, **fields), []
        while (plan := strategy.plan()) is not None:
            masked = plan.rows[0].masked
            tokens = tuple(EOS if position in (3, 5) else 5 for position in masked)
            values = tuple(probs[position - 3] for position in masked)
            filled.append(
                [fill.position for fill in strategy.absorb(plan, [RowResult(tokens, values, values)], 0, 0).fills]
            )
        assert filled == passes


def test_the_factor_for_llada_takes_the_last_mask_too() -> None:
    params = DecodingParams(decoding="parallel", block_size=3, acceptance="factor", max_new_tokens=3)
    for probs, filled in (({}, [3]), ({3: 0.9, 4: 0.9}, [3, 4, 5]), ({3: 0.9}, [3])):
        for properties, expected in ((LLADA, filled), (DREAM, filled[:2])):
            strategy = begin(SequenceStart([1] * 3, params, MASK, frozenset([EOS]), properties=properties))
            assert [fill.position for fill in one_pass(strategy, probs)[1].fills] == expected


def test_fast_dllm_for_llada_fills_in_its_first_pass() -> None:
    params = DecodingParams(decoding="fast_dllm", block_size=4, max_new_tokens=8)
    strategy = begin(SequenceStart([1] * 3, params, MASK, frozenset([EOS]), properties=LLADA))
    plan, record = one_pass(strategy, {4: 0.95, 6: 0.95})
    assert (plan.start, plan.rows[0].masked, [fill.position for fill in record.fills]) == (0, (3, 4, 5, 6), [4, 6])
    plan, _ = one_pass(strategy)
    assert (plan.start, plan.rows[0].masked) == (3, (3, 5))


def test_one_block_is_the_whole_canvas() -> None:
    strategy = start(block_size=64)
    plan, record = one_pass(strategy, {12: 0.95})
    assert plan.rows[0].masked == tuple(range(3, 13))
    assert [fill.position for fill in record.fills] == [12]


def test_fast_dllm_computes_everything_once_a_block() -> None:
    for block_cache, end in (("prefix", 13), ("dual", 7)):
        strategy = start(decoding="fast_dllm", block_cache=block_cache)
        plan, record = one_pass(strategy)
        assert (plan.start, plan.rows[0].end, plan.rows[0].masked) == (0, 13, (3,))
        assert [fill.position for fill in record.fills] == [3]
        plan, record = one_pass(strategy, {5: 0.95})
        row = plan.rows[0]
        assert (plan.start, plan.num_new, plan.prefix_length, row.start, row.end) == (3, 0, 3, 3, end)
        assert (row.masked, row.entry_ends, row.stale_end) == ((4, 5, 6), (end,), 13)
        assert row.tokens[:4] == (5, MASK, MASK, MASK)
        assert [fill.position for fill in record.fills] == [5]
        one_pass(strategy, {4: 0.95, 6: 0.95})
        plan, _ = one_pass(strategy)
        assert (plan.start, plan.rows[0].masked) == (0, (7,))
        assert strategy.num_committed == 0


def test_branches_of_fast_dllm_read_what_the_first_pass_of_a_block_leaves_in_every_slot() -> None:
    strategy = start(decoding="lopa", base="fast_dllm", block_cache="dual", num_branches=2)
    rows, filling, slots = [], [], []
    for prob in (0.1, 0.1, 0.1, 0.1, 0.1):
        plan = strategy.plan()
        assert plan is not None
        rows.append(len(plan.rows))
        filling.append(plan.fills_all_slots)
        slots.append(Placement().slot_ends(plan))
        results = [RowResult((5,) * len(r.masked), (prob,) * len(r.masked), (prob,) * len(r.masked)) for r in plan.rows]
        strategy.absorb(plan, results, 0, 0)
    # Positions 3 to 6: the first by the block's first pass, then one, then a branch's own and one.
    assert rows == [1, 1, 3, 1, 1]
    assert filling == [True, False, False, True, False]
    assert slots == [(13, 13, 13), (7, 0, 0), (7, 7, 7), (13, 13, 13), (11, 0, 0)]
    plan = strategy.plan()
    assert plan is not None
    first, other = Placement(2).share(plan), Placement(2, 1).share(plan)
    assert (len(first.rows), len(other.rows)) == (2, 1)


def test_every_group_computes_a_row_that_fills_all_slots() -> None:
    plan = start(decoding="lopa", base="fast_dllm", num_branches=2).plan()
    assert plan is not None
    own, other = Placement(2).share(plan), Placement(2, 1).share(plan)
    assert own.rows[0].masked == (3,)
    assert other.rows == (replace(own.rows[0], masked=()),)


def test_vanilla_ranks_the_whole_canvas() -> None:
    strategy = start(decoding="vanilla", steps=2)
    plan, record = one_pass(strategy, {4: 0.9, 6: 0.3, 9: 0.8, 12: 0.85})
    assert plan.rows[0].masked == tuple(range(3, 13))
    assert [fill.position for fill in record.fills] == [4, 6, 9, 12]  # 4.995, rounded down
    assert strategy.num_counted == 0
    plan, record = one_pass(strategy)
    assert len(record.fills) == 6
    assert strategy.plan() is None


@pytest.mark.parametrize("steps", [1, 7, 10, 11, 64, 999, 1000, 1001, 5000])
def test_steps_of_vanilla_that_fill_nothing_are_skipped(steps: int) -> None:
    strategy = start(decoding="vanilla", steps=steps)
    assert isinstance(strategy, Vanilla)
    masks, made = 10, []
    for step in range(steps):  # t(i) of the module's docstring, exactly
        times = [1 - Fraction(i * 999, 1000 * steps) for i in (step, step + 1)]
        filled = masks if step == steps - 1 else math.floor(masks * (1 - times[1] / times[0]))
        masks -= filled
        made += [(step, filled)] if filled else []
    found = []
    while strategy.plan() is not None:
        found.append((strategy.step, len(one_pass(strategy)[1].fills)))
    assert found == made


def test_the_positions_of_origin_are_filled_at_equal_rates() -> None:
    """Over many seeds each of four steps fills about a quarter of the canvas, and each position as often in each."""
    filled = [[0] * 10 for _ in range(4)]
    for seed in range(400):
        strategy = start(decoding="vanilla", alg="origin", steps=4, seed=seed)
        assert isinstance(strategy, Vanilla)
        while strategy.plan() is not None:
            step = strategy.step
            for fill in one_pass(strategy)[1].fills:
                filled[step][fill.position - 3] += 1
    assert all(60 < count < 140 for row in filled for count in row)
    assert all(900 < sum(row) < 1100 for row in filled)


def test_a_whole_canvas_ends_when_its_visible_text_is_final() -> None:
    for finish, num_forwards in ((True, 1), (False, 3)):
        strategy = start(finish_at_eos=finish)
        while strategy.plan() is not None:
            _, record = one_pass(strategy, dict.fromkeys(range(13), 0.95), token=EOS)
            assert (record.branches[0].end, record.branches[0].masks) == (13, 10 - 4 * record.index)
        assert strategy.num_opened == min(10, 4 * num_forwards)
        assert strategy.num_forwards == num_forwards
        assert strategy.final()[1] == EOS
        assert final_tokens(strategy) == ([] if finish else [EOS] * 10)


# ---- texts with gaps -------------------------------------------------------------------------------------------------


def start_with_gaps(canvas: list[int], flexible: tuple[int, ...] = (), **values: Any) -> Strategy:
    """A prompt of 3 tokens, and a canvas in which 0 is a mask."""
    canvas = [token or MASK for token in canvas]
    fields: dict[str, Any] = {"decoding": "parallel", "block_size": 4, "max_new_tokens": len(canvas), **values}
    return begin(
        SequenceStart(
            [1] * 3, DecodingParams(**fields), MASK, frozenset([EOS]), gapped=GappedText(tuple(canvas), flexible)
        )
    )


def test_given_tokens_are_filled_and_gaps_have_blocks_of_their_own() -> None:
    for decoding in ("parallel", "fast_dllm"):
        strategy = start_with_gaps([0, 0, 0, 0, 0, 8, EOS, 0, 0, 9], decoding=decoding, tau_conf=0.05)
        blocks = [(block.start, block.end, block.masks) for block in strategy.anchor.blocks[1:]]
        assert blocks == [(3, 7, 4), (7, 8, 1), (8, 10, 0), (10, 12, 2), (12, 13, 0)]
        seen = []
        while strategy.plan() is not None:
            plan, _ = one_pass(strategy)
            seen.append(plan.rows[0].masked)
            assert plan.rows[0].end == 13
            if not plan.rows[0].start:
                assert plan.rows[0].tokens[8:10] == (8, EOS)
        assert sorted(position for masked in seen for position in masked) == [3, 4, 5, 6, 7, 10, 11]
        assert (final_tokens(strategy), strategy.final()[0]) == ([5] * 7, [0, 1, 2, 3, 4, 7, 8])
        assert (strategy.final()[2], strategy.final()[1]) == (((5, None), (7, None)), None)


def test_a_token_that_ends_the_answer_ends_its_gap() -> None:
    strategy = start_with_gaps([0, 0, 0, 8, 0, 0], tau_conf=0.9)
    one_pass(strategy, {4: 0.95}, token=EOS)
    assert strategy.anchor.tokens == (MASK, EOS, EOS, 8, MASK, MASK)
    assert (final_tokens(strategy), strategy.final()[2]) == ([], ())
    one_pass(strategy)
    assert (final_tokens(strategy), strategy.final()[2]) == ([5], ((1, EOS),))
    one_pass(strategy, {7: 0.95, 8: 0.95}, token=EOS)
    assert (strategy.plan(), final_tokens(strategy)) == (None, [5])
    assert (strategy.final()[2], strategy.final()[1]) == (((1, EOS), (1, EOS)), EOS)


def test_dreams_decoding_makes_as_many_steps_as_there_are_masks() -> None:
    strategy = start_with_gaps([0, 0, 8, 8, 8, 0], decoding="vanilla", alg="maskgit_plus", block_size=32, seed=1)
    assert [len(one_pass(strategy)[1].fills) for _ in range(2)] == [1, 2]
    assert strategy.plan() is None


def test_a_length_is_found_by_what_is_behind_the_gap() -> None:
    """Means that fall with the length, but for a peak where what is behind the gap fits."""
    for longest, fits in ((1, 1), (2, 2), (9, 9), (32, 23), (100, 65), (256, 201), (7, 1)):
        search, tried = LengthSearch(longest), list[tuple[int, bool]]()
        while (length := search.candidate) is not None:
            tried.append((length, search.sees_behind))
            search.take(-math.log(length) - (abs(length - fits) / longest if search.sees_behind else 0.0))
        assert search.best == fits
        assert len(tried) == len(set(tried)) <= longest + longest.bit_length() + 1
        assert [sees for _, sees in tried] == sorted(sees for _, sees in tried)
        assert max(tried)[0] == longest
    search = LengthSearch(256)
    num_tried = 0
    while search.candidate is not None:
        search.take(-1.0)
        num_tried += 1
    assert num_tried < 90


def test_the_first_passes_find_lengths_and_fill_nothing() -> None:
    """Where a gap of two is surer with what is behind it than without, it becomes two."""
    for fields in ({}, {"decoding": "vanilla", "seed": 1}, {"decoding": "fast_dllm"}):
        strategy = start_with_gaps([0, 0, 0, 0, 8, 9, 0, 0, 0], flexible=(0,), **fields)
        tried = []
        while isinstance(strategy, Measuring):
            plan = strategy.plan()
            assert plan is not None
            row = plan.rows[0]
            num_masks, sees_behind = len(row.masked), row.tokens[-1] != 8 and 8 in row.tokens
            tried.append((num_masks, sees_behind))
            assert row.masked == tuple(range(3, 3 + num_masks))
            prob = 0.5 if num_masks == 2 and sees_behind else 0.1
            record = strategy.absorb(
                plan, [RowResult((5,) * num_masks, (prob,) * num_masks, (prob,) * num_masks)], 0, 0
            )
            assert (record.fills, final_tokens(strategy)) == ((), [])
            strategy = strategy.successor or strategy
        assert tried == [(1, False), (2, False), (4, False), (1, True), (2, True), (3, True), (4, True)]
        assert strategy.anchor.tokens == (MASK, MASK, 8, 9, MASK, MASK, MASK)
        assert [fill.position for fill in record.forced] == [5, 6]
        assert (record.index, strategy.num_forwards) == (6, 7)


def test_only_a_whole_canvas_has_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(
        vocab_size=100,
        mask_token_id=MASK,
        max_model_len=512,
        num_pages=64,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_num_branches=0,
    )
    monkeypatch.setattr(decodings, "_registered", dict(decodings._registered))
    register_decoding("windows", type("Windows", (BlockPipeline,), {}))
    register_decoding("canvases", type("Canvases", (Parallel,), {}))
    text = GappedText((MASK, 5))
    for decoding in ("parallel", "vanilla", "fast_dllm", "canvases"):
        limits.check_gaps(DecodingParams(decoding=decoding, max_new_tokens=2), text)
    for decoding in ("d2f", "lopa", "windows"):
        with pytest.raises(ParameterError, match=f'^gaps: .*"{decoding}".* use decoding .*"parallel"'):
            limits.check_gaps(DecodingParams(decoding=decoding, max_new_tokens=2), text)
    for properties in (FAMILIES["sdar"].properties, FAMILIES["Fast_dLLM_Qwen"].properties):
        with pytest.raises(ParameterError, match="block-causal"):
            replace(limits, properties=properties).check_gaps(DecodingParams(max_new_tokens=2), text)
