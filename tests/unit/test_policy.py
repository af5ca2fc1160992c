"""What must hold of both strategies whatever the model says: driven with random confidences."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import RowResult, SequencePlan
from tests.answers import final_tokens
from tests.tiers import examples

MASK, EOS, VOCAB = 50, 7, 40

setups = st.fixed_dictionaries(
    {
        "num_branches": st.integers(0, 4),
        "block_size": st.integers(1, 9),
        "max_new_tokens": st.integers(1, 40),
        "tau_add": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "tau_act": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "tau_conf": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "max_active_blocks": st.sampled_from([None, 1, 2]),
        "window_attention": st.sampled_from(["block_causal", "full"]),
        "branch_score": st.sampled_from(["mean", "tail", "window"]),
        "creation_weight": st.sampled_from([0.0, 0.5]),
        "ignore_eos": st.booleans(),
    }
)


def answer(plan: SequencePlan, seed: int, round_: int) -> list[RowResult]:
    """A model whose predictions are a function of (seed, round, position, branch), one in twenty an EOS."""
    out = []
    for index, row in enumerate(plan.rows):
        rngs = [random.Random(f"{seed} {round_} {position} {index}") for position in row.masked]
        tokens = tuple(EOS if rng.random() < 0.05 else rng.randrange(VOCAB) for rng in rngs)
        confidences = tuple(rng.random() for rng in rngs)
        out.append(RowResult(tokens, confidences, confidences))
    return out


def drive(setup: dict, seed: int, finish: bool):
    """Yields (strategy, record) after each step."""
    params = DecodingParams(**setup, finish_at_eos=finish)
    strategy = begin(SequenceStart([1, 2, 3], params, MASK, frozenset([EOS])))
    while (plan := strategy.plan()) is not None:
        yield strategy, strategy.absorb(plan, answer(plan, seed, strategy.num_forwards), 0, 0)
    yield strategy, None


@settings(max_examples=examples(300))
@given(setups, st.integers(0, 10**6))
def test_every_step_fills_a_position_or_the_request_ends(setup: dict, seed: int) -> None:
    idle = 0
    before: list[int] = []
    for strategy, record in drive(setup, seed, finish=False):
        assert idle == 0 or record is None
        tokens = strategy.anchor.tokens
        assert all(old in (MASK, new) for old, new in zip(before, tokens, strict=False)), "a filled position changed"
        if record is not None and record.branches[record.winner].lookahead is None:
            idle += not record.fills
        elif record is not None and not record.fills:  # a winner without masks spends the published closing pass
            assert not record.branches[record.winner].masks
        before = list(tokens)
    assert MASK not in before
    assert strategy.num_forwards <= setup["max_new_tokens"] + 1
    assert strategy.num_committed <= 3 + setup["max_new_tokens"]


@settings(max_examples=examples(300))
@given(setups, st.integers(0, 10**6))
def test_finishing_early_changes_no_visible_token(setup: dict, seed: int) -> None:
    *_, (whole, _) = drive(setup, seed, finish=False)
    *_, (early, _) = drive(setup, seed, finish=True)
    visible = list(whole.answer.tokens)
    if not setup["ignore_eos"] and EOS in visible:
        visible = visible[: visible.index(EOS)]
    assert final_tokens(early) == visible
    assert early.num_forwards <= whole.num_forwards


@settings(max_examples=examples(100))
@given(setups, st.integers(0, 10**6))
def test_what_is_final_only_grows(setup: dict, seed: int) -> None:
    final: list[int] = []
    for strategy, _ in drive(setup, seed, finish=True):
        assert final_tokens(strategy)[: len(final)] == final
        final = final_tokens(strategy)


@settings(max_examples=examples(100))
@given(setups, st.integers(0, 10**6))
def test_plans_are_consistent(setup: dict, seed: int) -> None:
    params = DecodingParams(**setup)
    strategy = begin(SequenceStart([1, 2, 3], params, MASK, frozenset([EOS])))
    while (plan := strategy.plan()) is not None:
        assert strategy.plan() == plan, "a plan changes nothing"
        assert 1 <= len(plan.rows) <= plan.max_rows == 1 + params.lookaheads
        anchor = plan.rows[-1]
        for row in plan.rows:
            assert row.start == plan.start == strategy.num_committed
            assert row.entry_ends[-1] == row.end
            assert [p for p, t in enumerate(row.tokens, row.start) if t == MASK] == list(row.masked)
            shared = row.compute_from - row.start
            assert row.tokens[:shared] == anchor.tokens[:shared]
            assert plan.num_new <= shared or params.window_attention == "full" or row is anchor
            assert not any(MASK == t for t in row.tokens[: plan.num_new])
        branches = strategy.branches
        record = strategy.absorb(plan, answer(plan, seed, strategy.num_forwards), 0, 0)
        assert strategy.anchor == strategy.open(strategy.advance(branches[record.winner], record.fills))
