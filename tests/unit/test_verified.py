"""Lookahead branches that the anchor's predictions must confirm: against the rule restated, and against D2F."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.decodings import values_of
from lopa_ascend.decode import begin
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.decode.verified import draft_ranks
from lopa_ascend.types import DREAM, ModelProperties, RowPlan, RowResult, SequencePlan, StepRecord
from tests.answers import final_tokens
from tests.tiers import examples, slow_but

MASK, EOS, VOCAB, PROMPT = 50, 7, 40, (1, 2, 3)

setups = st.fixed_dictionaries(
    {
        "num_branches": st.integers(0, 6),
        "block_size": st.integers(1, 9),
        "max_new_tokens": st.integers(1, 40),
        "tau_add": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "tau_act": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "tau_conf": st.sampled_from([0.5, 0.8, 0.9, 1.0]),
        "max_active_blocks": st.sampled_from([None, 1, 2]),
        "window_attention": st.sampled_from(["block_causal", "full"]),
        "acceptance": st.sampled_from(["threshold", "factor"]),
        "ignore_eos": st.booleans(),
        "finish_at_eos": st.booleans(),
    }
)
CAUSAL = (
    ModelProperties(logit_shift=0, attention="causal"),
    ModelProperties(logit_shift=1, attention="causal"),
)
causal_setups = st.fixed_dictionaries(
    {
        "num_branches": st.integers(0, 6),
        "block_size": st.integers(1, 9),
        "sub_block_size": st.integers(1, 9),
        "max_new_tokens": st.integers(1, 40),
        "tau_conf": st.sampled_from([0.5, 0.8, 0.9, 1.0]),
        "acceptance": st.sampled_from(["threshold", "factor"]),
        "ignore_eos": st.booleans(),
        "finish_at_eos": st.booleans(),
        "properties": st.sampled_from(CAUSAL),
    }
)
depths = st.sampled_from([1, 2, 3, 8])
"""Values of lookahead_depth."""


class Model:
    """Predictions as a function of what is committed, of how it came to be, and of the tokens of the row: like a model
    whose keys and values hold all of that. Of two rows that differ in anything, tokens often agree."""

    def __init__(self, seed: int):
        self.seed = seed
        self.commits: list[tuple[int, tuple[int, ...]]] = []
        """What the cache depends on: (positions, tokens of the row) of each pass that committed."""

    def row(self, row: RowPlan) -> RowResult:
        state = f"{self.seed} {self.commits} {row.start} {row.tokens} {row.entry_ends}"
        tokens, probs = [], []
        for position in row.masked:
            usual, now = random.Random(f"{self.seed} {position}"), random.Random(f"{state} {position}")
            rng = usual if now.random() < 0.8 else now
            tokens.append(EOS if rng.random() < 0.03 else rng.randrange(VOCAB))
            # The same positions tend to be the surest ones.
            probs.append(0.7 * usual.random() + 0.3 * now.random())
        return RowResult(tuple(tokens), tuple(probs), tuple(probs))

    def commit(self, plan: SequencePlan, record: StepRecord) -> None:
        if plan.num_new:
            self.commits.append((plan.num_new, plan.rows[record.winner].tokens))


def run(setup: dict, seed: int, **changes):
    """Yields (strategy, plan, results, record) after each pass."""
    fields = {"properties": DREAM, **setup, **changes}
    properties = fields.pop("properties")
    start = SequenceStart(PROMPT, DecodingParams(**fields), MASK, frozenset([EOS]), properties=properties)
    strategy, model = begin(start), Model(seed)
    while (plan := strategy.plan()) is not None:
        results = [model.row(row) for row in plan.rows]
        record = strategy.absorb(plan, results, 0, 0)
        model.commit(plan, record)
        yield strategy, plan, results, record


def decoded(setup: dict, seed: int, **changes) -> tuple[list[int], list[float], int, list[tuple[int, int]]]:
    """(final token ids, their probabilities, number of passes, fills in the order in which they were made)."""
    passes = [(strategy, record) for strategy, _, _, record in run(setup, seed, **changes)]
    strategy, order = passes[-1][0], []
    for _, record in passes:
        won = record.branches[record.winner]
        # Who has more tokens of its own was confirmed later; of one pass the positions ascend.
        since = [len(record.branches[source].own_fills) for source in won.confirmed_by]
        own = sorted(zip(since, won.own_fills, strict=True), key=lambda pair: (pair[0], pair[1].position))
        order += [(fill.position, fill.token) for _, fill in own]
        order += [(fill.position, fill.token) for fill in record.fills]
    tokens = final_tokens(strategy)
    return tokens, strategy.answer.probs[: len(tokens)], strategy.num_forwards, order


def rule(params: DecodingParams, row: RowPlan, result: RowResult) -> set[tuple[int, int]]:
    """What D2F fills into a row, restated from its tokens and predictions alone."""
    tokens = dict(enumerate(row.tokens, row.start))
    is_mask = {position: token == MASK for position, token in tokens.items()}
    predicted = dict(zip(row.masked, zip(result.tokens, result.max_probs, strict=True), strict=True))
    found = set()
    starts = range(len(PROMPT), row.end, params.block_size)
    filled_before = 1.0  # the share of the block before, the prompt's at first
    for start in starts:
        block = range(start, min(start + params.block_size, row.end))
        here = sorted((p for p in block if p in predicted), key=lambda p: (-predicted[p][1], p))
        probs = [predicted[p][1] for p in here]
        counts = [0]
        for n in range(1, len(here) + 1):
            lowest = probs[n - 1]
            if params.acceptance == "threshold":
                allowed = lowest > D2F_TAU[params.tau_conf]
            else:
                allowed = (n + 1) * (1 - lowest) < params.acceptance_factor
            counts += [n] if allowed else []
        take = max(counts)
        if not take and here and filled_before >= params.tau_act:
            take = 1
        found |= {(p, predicted[p][0]) for p in here[:take]}
        filled_before = sum(not is_mask.get(p, False) for p in block) / len(block)
    return found


D2F_TAU = {0.5: 0.5, 0.8: 0.800000011920929, 0.9: 0.8999999761581421, 1.0: 1.0}
"""float32 of tau_conf."""


def added(row: RowPlan, anchor: RowPlan) -> set[tuple[int, int]]:
    """The tokens that a row has beside the anchor's."""
    tokens = dict(enumerate(row.tokens, row.start))
    return {(position, tokens[position]) for position in anchor.masked if tokens.get(position, MASK) != MASK}


@settings(max_examples=examples(150))
@given(setups, st.integers(0, 10**6), depths)
def test_verified_every_token_passed_the_rule_given_committed_tokens_alone(setup: dict, seed: int, depth: int) -> None:
    committed: dict[int, int] = {}
    changes: dict[str, Any] = {"branch_acceptance": "verified", "lookahead_depth": depth}
    params = DecodingParams(**setup, **changes)
    for strategy, plan, results, record in run(setup, seed, **changes):
        anchor, won = plan.rows[-1], record.branches[record.winner]
        for position, token in enumerate(anchor.tokens, anchor.start):
            assert position < len(PROMPT) or committed.get(position, MASK) == token
        row, result = plan.rows[record.winner], results[record.winner]
        own = added(row, anchor)
        assert own == {(fill.position, fill.token) for fill in won.own_fills}
        assert len(own) <= depth
        for fill, source in zip(won.own_fills, won.confirmed_by, strict=True):
            judge, judged = plan.rows[source], results[source]
            assert added(judge, anchor) < own, "confirmed by what is not accepted"
            assert (fill.position, fill.token) in rule(params, judge, judged)
            assert fill.max_prob == judged.max_probs[judge.masked.index(fill.position)]
            assert strategy.answer.probs[fill.position - len(PROMPT)] == fill.max_prob
        committed |= dict(own)
        for position, token in enumerate(row.tokens, row.start):
            if position >= len(PROMPT):
                assert committed.get(position, MASK) == token, "predicted from a token that is not committed"
        assert {(fill.position, fill.token) for fill in record.fills} == rule(params, row, result)
        committed |= {fill.position: fill.token for fill in record.fills}
        # No confirmed branch would have filled more.
        rows = [
            (added(other, anchor), rule(params, other, seen)) for other, seen in zip(plan.rows, results, strict=True)
        ]
        confirmed = [rows[-1]]
        for _ in rows:
            confirmed += [
                other
                for other in rows
                if other not in confirmed
                and any(tokens < other[0] and other[0] <= tokens | fills for tokens, fills in confirmed)
            ]
        assert max(len(tokens) + len(fills) for tokens, fills in confirmed) == len(own) + len(record.fills)


@settings(max_examples=examples(200))
@given(setups, st.integers(0, 10**6), depths)
def test_exact_is_d2f(setup: dict, seed: int, depth: int) -> None:
    tokens, probs, passes, order = decoded(setup, seed, decoding="d2f", num_branches=0)
    exact = decoded(setup, seed, branch_acceptance="exact", lookahead_depth=depth)
    assert exact[:2] == (tokens, probs)
    assert exact[2] <= passes
    assert exact[3][: len(order)] == order


@settings(max_examples=examples(200))
@given(causal_setups, st.integers(0, 10**6), depths)
def test_exact_is_causal_blocks(setup: dict, seed: int, depth: int) -> None:
    tokens, probs, passes, order = decoded(setup, seed, decoding="causal_blocks", num_branches=0)
    exact = decoded(setup, seed, base="causal_blocks", branch_acceptance="exact", lookahead_depth=depth)
    assert exact[:2] == (tokens, probs)
    assert exact[2] <= passes
    assert exact[3][: len(order)] == order


@pytest.mark.parametrize("acceptance", ["published", "verified", "exact"])
@pytest.mark.parametrize("properties", CAUSAL)
def test_lookahead_branches_stay_in_the_block_whose_commit_is_the_anchors(
    acceptance: str, properties: ModelProperties
) -> None:
    setup: dict[str, Any] = {"block_size": 8, "sub_block_size": 4, "max_new_tokens": 26, "num_branches": 3}
    setup |= {"ignore_eos": True, "tau_conf": 1.0, "base": "causal_blocks", "branch_acceptance": acceptance}
    setup["properties"] = properties
    drafted = 0
    for seed in range(20):
        commits = []
        for _, plan, _, _ in run(setup, seed):
            *lookaheads, anchor = plan.rows
            if anchor.is_causal:
                assert not lookaheads
                assert (plan.num_new, anchor.masked) == (anchor.end - anchor.start, (anchor.end,))
                commits.append(anchor.end)
            else:
                assert not plan.num_new
            for row in lookaheads:
                assert not row.is_causal
                assert MASK in row.tokens
                assert (row.start, row.end) == (anchor.start, anchor.end)
            drafted += len(lookaheads)
        assert commits == [3, 11, 19, 27]
    assert drafted > 100


@pytest.mark.parametrize(
    ("acceptance", "depth", "least", "window"),
    slow_but(
        [
            (acceptance, depth, least, window)
            for acceptance, depth, least in (
                ("verified", 1, 1.2),
                ("exact", 1, 1.05),
                ("verified", 4, 1.5),
                ("exact", 4, 1.2),
            )
            for window in ("block_causal", "full")
        ],
        [("verified", 4, 1.5, "block_causal"), ("exact", 1, 1.05, "full")],
    ),
)
def test_confirmed_branches_save_passes(window: str, acceptance: str, depth: int, least: float) -> None:
    setup: dict[str, Any] = {
        "num_branches": 6,
        "block_size": 8,
        "max_new_tokens": 40,
        "tau_conf": 0.8,
        "ignore_eos": True,
    }
    setup |= {"window_attention": window}
    changes: dict[str, Any] = {"branch_acceptance": acceptance, "lookahead_depth": depth}
    passes = [sum(1 for _ in run(setup, seed, **changes)) for seed in range(20)]
    alone = [sum(1 for _ in run(setup, seed, decoding="d2f", num_branches=0)) for seed in range(20)]
    assert sum(alone) > least * sum(passes)


@settings(max_examples=examples(50))
@given(setups, st.integers(0, 10**6), st.sampled_from(["verified", "exact"]))
def test_without_branches_there_is_nothing_to_accept(setup: dict, seed: int, acceptance: str) -> None:
    alone = decoded({**setup, "num_branches": 0}, seed, branch_acceptance=acceptance)
    assert alone == decoded({**setup, "num_branches": 0}, seed, decoding="d2f")


@pytest.mark.parametrize(("tau_add", "winner"), [(0.5, 0), (0.0, 2), (1.0, 0)])
def test_exact_follows_d2f_in_opening_blocks(tau_add: float, winner: int) -> None:
    """With 0.5 the draft opens the second block, as D2F would one pass later; with 0 D2F would open a third one then,
    which the draft does not have."""
    params = DecodingParams(
        block_size=4, max_new_tokens=12, num_branches=2, tau_conf=1.0, tau_add=tau_add, branch_acceptance="exact"
    )
    strategy = begin(SequenceStart([1], params, MASK, frozenset()))
    for expected in (0, winner):  # two passes: in the second one the anchor confirms the better draft
        plan = strategy.plan()
        assert plan is not None
        results = []
        for row in plan.rows:
            probs = tuple(0.5 - 0.01 * position for position in row.masked)
            results.append(RowResult((5,) * len(probs), probs, probs))
        assert strategy.absorb(plan, results, 0, 0).winner == expected


def test_a_draft_without_masks_has_not_won() -> None:
    params = DecodingParams(block_size=4, max_new_tokens=4, num_branches=2)
    row = RowResult((1, 2, 3, 4), (0.95, 0.95, 0.95, 0.2), (0.95, 0.95, 0.95, 0.2))
    for acceptance, passes in (("published", 1), ("verified", 2), ("exact", 2)):
        strategy = begin(SequenceStart([1], params.changed(branch_acceptance=acceptance), MASK, frozenset()))
        plan = strategy.plan()
        assert plan is not None
        strategy.absorb(plan, [row], 0, 0)
        while (plan := strategy.plan()) is not None:
            last = RowResult((5,), (0.3,), (0.3,))
            results = [last if row.masked else RowResult((), (), ()) for row in plan.rows]
            assert strategy.absorb(plan, results, 0, 0).winner == len(plan.rows) - 1  # 4 is not confirmed
        assert strategy.num_forwards == passes
        assert final_tokens(strategy) == [1, 2, 3, 4 if acceptance == "published" else 5]


def test_exact_saves_as_many_passes_as_there_are_branches_in_a_row() -> None:
    """D2F fills one position in each pass, the best one. The drafts hold the best, the best two, the second best, the
    best three."""
    params = DecodingParams(
        block_size=8, max_new_tokens=8, num_branches=4, tau_conf=1.0, branch_acceptance="exact", lookahead_depth=3
    )
    strategy = begin(SequenceStart([1], params, MASK, frozenset()))
    winners = []
    while (plan := strategy.plan()) is not None:
        results = []
        for row in plan.rows:
            probs = tuple(0.5 - 0.01 * position for position in row.masked)
            results.append(RowResult((5,) * len(probs), probs, probs))
        record = strategy.absorb(plan, results, 0, 0)
        winners.append(record.winner)
        won = record.branches[record.winner]
        assert won.confirmed_by == {0: (), 3: (4, 0, 1), 1: (4, 0)}[record.winner]
    assert winners == [0, 3, 1]  # 1, 4 and 3 positions; with the last one the block is to be committed
    assert final_tokens(strategy) == [5] * 8


def test_what_drafts_hold() -> None:
    """The most promising sets first; positions of fully activated blocks before all others."""
    assert draft_ranks(8, 1, 3) == ((0,), (1,), (2,))
    assert draft_ranks(8, 2, 7) == ((0,), (0, 1), (1,), (0, 2), (2,), (0, 3), (1, 2))
    assert draft_ranks(2, 8, 99) == ((0,), (0, 1), (1,))
    assert draft_ranks(0, 8, 99) == ()
    for num_ranks in range(7):
        everything = draft_ranks(num_ranks, 16, 255)
        assert len(set(everything)) == len(everything) == 2**num_ranks - 1
        assert all(draft_ranks(num_ranks, 3, count) == draft_ranks(num_ranks, 3, 99)[:count] for count in range(9))
    params = DecodingParams(
        block_size=4, max_new_tokens=8, num_branches=3, tau_add=0.0, branch_acceptance="exact", lookahead_depth=2
    )
    strategy = begin(SequenceStart([1], params, MASK, frozenset()))
    for token in (5, 6):  # so no draft of the first pass is confirmed by the second one
        plan = strategy.plan()
        assert plan is not None
        results = []
        for row in plan.rows:
            probs = tuple(0.8 if position > 4 else 0.5 - 0.01 * position for position in row.masked)
            results.append(RowResult((token,) * len(probs), probs, probs))
        strategy.absorb(plan, results, 0, 0)
    own = [tuple(fill.position for fill in branch.own_fills) for branch in strategy.branches]
    assert own == [(3,), (3, 4), (4,), ()], "the second block, which is surer, is not fully activated"


def test_drafts_of_several_tokens_must_be_confirmed() -> None:
    message = r'lookahead_depth.*2 does not go with branch_acceptance "published"; use .* "verified" or "exact"'
    with pytest.raises(ParameterError, match=message):
        DecodingParams(lookahead_depth=2)
    with pytest.raises(ParameterError, match="lookahead_depth"):
        DecodingParams(decoding="parallel", lookahead_depth=2)
    defaults = {"branch_acceptance": "exact", "lookahead_depth": 8}
    for asked in ({"branch_acceptance": "published"}, {"decoding": "parallel"}, {"base": "fast_dllm"}):
        assert "lookahead_depth" not in fitting_defaults(defaults, asked)
    assert fitting_defaults(defaults, {"decoding": "d2f"}) == {"branch_acceptance": "exact"}


def test_every_branch_acceptance_has_a_strategy() -> None:
    assert values_of("branch_acceptance") == ("published", "verified", "exact")
    for name in values_of("branch_acceptance"):
        strategy = begin(SequenceStart([1], DecodingParams(branch_acceptance=name), MASK, frozenset()))
        assert isinstance(strategy, Lopa)
        assert strategy.branch_acceptance == name


def test_exact_with_sampling_is_refused() -> None:
    with pytest.raises(
        ParameterError, match=r'branch_acceptance.*"exact" does not go with temperature 0\.5; use temperature 0'
    ):
        DecodingParams(branch_acceptance="exact", temperature=0.5)
    assert DecodingParams(branch_acceptance="exact", temperature=1e-6).temperature == 0
    assert DecodingParams(branch_acceptance="verified", temperature=0.5).temperature == 0.5
