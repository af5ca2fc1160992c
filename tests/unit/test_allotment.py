"""How many lookahead branches requests get where that follows the load, on paper: costs and predictions are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lopa_ascend.decode.allotment import OBSERVED, Allotment, Applicant, StepCosts

from lopa_ascend.config import DecodingParams, ParameterError, fitting_defaults
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.types import BranchRecord, RowPlan, RowResult, SequencePlan, StepRecord
from scripts.planner.devices import Device, load_device
from scripts.planner.models import load_model
from scripts.planner.step import Workload, predict
from tests.tiers import slow_but

AUTO = DecodingParams(num_branches="auto", branch_acceptance="verified")
FLAT, STEEP = StepCosts([(1, 1.0), (10_000, 1.0)]), StepCosts([(1, 1.0), (10_000, 10_000.0)])
FULL = tuple(32 * rows for rows in range(1, 9))
SIMULATED = (0, 1, 3, 7)
"""Fixed numbers of lookahead branches."""


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 10)), min_size=1, unique_by=lambda point: point[0]))
def test_costs_never_fall_and_are_exact_at_points(points: list[tuple[int, float]]) -> None:
    costs = StepCosts(points)
    seconds = [costs.seconds(tokens) for tokens in range(1, 1100)]
    assert all(a <= b + 1e-9 for a, b in zip(seconds, seconds[1:], strict=False))
    for tokens, _ in points:
        shortest = min(s for t, s in points if t >= tokens)
        assert costs.seconds(tokens) == pytest.approx(shortest)


def test_free_rows_are_all_computed_and_rows_of_full_price_are_not() -> None:
    applicants = [Applicant(AUTO, False, FULL)] * 3
    assert Allotment(FLAT, 10_000).choose(applicants) == [7, 7, 7]
    assert Allotment(STEEP, 10_000).choose(applicants) == [0, 0, 0]


def test_rows_become_fewer_the_more_requests_there_are() -> None:
    costs = StepCosts([(1, 1.0), (512, 1.05), (4096, 8.0)])
    rows = [Allotment(costs, 10_000).choose([Applicant(AUTO, False, FULL)] * n) for n in (1, 4, 16, 64)]
    means = [sum(chosen) / len(chosen) for chosen in rows]
    assert means == sorted(means, reverse=True)
    assert (means[0], means[-1]) == (7, 0)
    # Tokens of requests that do not applicant fill the device too.
    assert Allotment(costs, 10_000).choose([Applicant(AUTO, False, FULL)], others=[32] * 63) == [0]


def test_branches_fill_no_step_beyond_its_limit() -> None:
    assert Allotment(FLAT, 200).choose([Applicant(AUTO, False, FULL)] * 2) == [2, 2]
    assert Allotment(FLAT, 10).choose([Applicant(AUTO, False, FULL)] * 2) == [0, 0]


def record(num_lookaheads: int, winner: int) -> StepRecord:
    branches = tuple(BranchRecord(None, 0, 0, 0.0) for _ in range(num_lookaheads + 1))
    return StepRecord(0, (0, 0), 0, 0, branches, winner, (), 0, 0, 0)


def test_what_has_won_is_tried_again_and_what_never_wins_is_not() -> None:
    costs = StepCosts([(32, 1.0), (64, 1.1), (4096, 40.0)])
    allotment = Allotment(costs, 10_000)
    stuck, free = Applicant(AUTO, True, FULL[:2]), Applicant(AUTO, False, FULL[:2])
    assert allotment.choose([stuck]) == allotment.choose([free]) == [1]
    for _ in range(100):
        allotment.learn(stuck, record(1, 0))
        allotment.learn(free, record(1, 1))
    assert (allotment.choose([stuck]), allotment.choose([free])) == ([1], [0])
    assert allotment.choose([free, stuck]) == [0, 1]


def test_branches_over_tokens_are_counted_apart() -> None:
    allotment = Allotment(StepCosts([(32, 1.0), (64, 1.1), (4096, 40.0)]), 10_000)
    positions, tokens = (
        Applicant(replace(AUTO, branch_candidates=kind), False, FULL[:2]) for kind in ("positions", "tokens")
    )
    for _ in range(100):
        allotment.learn(positions, record(1, 0))
        allotment.learn(tokens, record(1, 1))
    assert (allotment.choose([positions]), allotment.choose([tokens])) == ([1], [0])


def test_branches_that_were_dropped_are_tried_once_they_would_have_won() -> None:
    costs = StepCosts([(32, 1.0), (64, 1.4), (4096, 60.0)])
    allotment, applicant = Allotment(costs, 10_000), Applicant(AUTO, False, FULL[:2])
    assert allotment.choose([applicant]) == [0]
    for would_win, chosen in ((1.0, 1), (0.0, 0)):
        for _ in range(100):
            allotment.learn(applicant, record(0, 0), 0.75, (would_win,))
        assert allotment.choose([applicant]) == [chosen]


def test_what_steps_take_beyond_their_costs_makes_rows_cheaper() -> None:
    """For every rank as much as rank 0 says, once enough steps were observed."""
    costs, applicant = StepCosts([(32, 1.0), (64, 1.4), (4096, 60.0)]), Applicant(AUTO, False, FULL[:2])
    asked: list[int] = []

    def agree(nanoseconds: int) -> int:
        asked.append(nanoseconds)
        return 3 * 10**9

    allotment = Allotment(costs, 10_000, agree)
    for _ in range(OBSERVED):
        assert allotment.choose([applicant]) == [0]
        allotment.observe(1.5)
    assert asked == [5 * 10**8]
    assert allotment.choose([applicant]) == [1]
    alone = Allotment(costs, 10_000)
    for _ in range(OBSERVED):
        alone.observe(100.0)
    assert alone.choose([applicant]) == [0]


@pytest.mark.parametrize(("acceptance", "probability"), [("verified", 0.7), ("exact", 1.0)])
@pytest.mark.parametrize("token", [5, 6])
def test_a_pass_shows_whether_a_branch_that_was_dropped_would_have_won(
    acceptance: str, probability: float, token: int
) -> None:
    """The lookahead token is 5, and the anchor's next pass predicts it above tau_conf, or another token."""
    params = replace(AUTO, branch_acceptance=acceptance, block_size=8, max_new_tokens=8)
    strategy = begin([1], params, 99, frozenset())

    def step(token: int, probs: tuple[float, ...], kept: int) -> None:
        plan = strategy.plan()
        assert plan is not None
        plan = strategy.keep(plan, kept)
        found = [RowResult((token,) * len(r.masked), probs[: len(r.masked)], probs) for r in plan.rows]
        strategy.absorb(plan, found, 0, 0)

    step(5, (0.95, 0.5, *[0.2] * 6), 0)
    assert not strategy.wins_of_dropped
    assert strategy.branches[0].lookahead is not None
    step(token, (0.95, *[0.2] * 6), 0)
    assert strategy.wins_of_dropped == (probability * (token == 5),)


@pytest.mark.parametrize("bp", [1, 2, 4])
def test_costs_of_a_plan_are_those_of_the_group_that_computes_most(bp: int) -> None:
    rows = tuple(RowPlan(0, (0,) * 64, start, (32, 64), (1,)) for start in (32, 0, 32, 0))
    plan = SequencePlan(0, 0, rows, 4, 2, False, 0)
    placement = Placement(bp)
    expected = [placement.demand(replace(plan, rows=(*rows[:k], rows[-1]))).num_computed for k in range(4)]
    assert list(placement.costs(plan)) == expected
    if bp == 1:
        assert expected == [64, 96, 160, 192]


# ---- auto by a request's own state -----------------------------------------------------------------------------------


def test_without_a_look_at_the_load_branches_are_made_where_the_request_is_stuck() -> None:
    params = DecodingParams(num_branches="auto", max_auto_branches=3, block_size=8, max_new_tokens=8, tau_conf=0.9)
    assert (params.lookaheads, params.follows_load) == (3, False)
    strategy = begin([1], params, 99, frozenset())
    rows = []
    for prob in (0.5, 0.95, 0.2, 0.2):
        plan = strategy.plan()
        assert plan is not None
        rows.append(len(plan.rows))
        first = (prob, *[0.2] * 7)
        results = [RowResult((5,) * len(r.masked), first[: len(r.masked)], first[: len(r.masked)]) for r in plan.rows]
        strategy.absorb(plan, results, 0, 0)
    assert rows == [1, 4, 1, 4]


def test_what_goes_with_auto() -> None:
    assert DecodingParams(num_branches="auto", branch_acceptance="exact").follows_load
    assert DecodingParams(num_branches="auto", branches_by_load=True).follows_load
    assert not DecodingParams(num_branches="auto", branch_acceptance="exact", branches_by_load=False).follows_load
    with pytest.raises(ParameterError, match=r'num_branches.*integer from 0 to 255 or "auto", got \'many\''):
        DecodingParams(num_branches="many")
    with pytest.raises(ParameterError, match='num_branches.*must be 0 with decoding "d2f", got auto'):
        DecodingParams(decoding="d2f", num_branches="auto")
    with pytest.raises(ParameterError, match='branches_by_load.*true needs num_branches "auto", got 3'):
        DecodingParams(branches_by_load=True)
    server = {"num_branches": "auto", "branches_by_load": True}
    assert fitting_defaults(server, {}) == server
    assert fitting_defaults(server, {"num_branches": 3}) == {"num_branches": "auto"}
    assert fitting_defaults(server, {"decoding": "d2f"}) == {}


# ---- on a simulated device -------------------------------------------------------------------------------------------


def results(plan: SequencePlan, strategy: Strategy, seed: int) -> list[RowResult]:
    """Predictions of a model that knows the text, and is the surer of a position the more of its neighbours are
    filled."""
    found = []
    for row in plan.rows:
        text = dict(zip(range(row.start, row.end), row.tokens, strict=True))
        probs = []
        for q in row.masked:
            known = sum(text.get(q + d, 99) != 99 for d in (-4, -3, -2, -1, -1, 1, 1, 2)) / 8
            hardness = (seed * 7919 + q * 104_729) % 97 / 97
            probs.append(min(0.999, 0.35 + 0.75 * known - 0.3 * hardness + (q * 31 % 13) * 1e-4))
        found.append(RowResult(tuple(q % 50 for q in row.masked), tuple(probs), tuple(probs)))
    return found


def simulate(num_requests: int, params: DecodingParams, costs: StepCosts, rounds: int = 3) -> float:
    """Seconds of the simulated device for some requests at a time, of which each is followed by another."""
    placement, allotment, seconds = Placement(), Allotment(costs, 65_536), 0.0
    waiting = list(range(rounds * num_requests))
    running: list[tuple[int, Strategy]] = []
    while waiting or running:
        while waiting and len(running) < num_requests:
            seed = waiting.pop(0)
            running.append((seed, begin([1], params, 99, frozenset())))
        planned = [(seed, strategy, strategy.plan()) for seed, strategy in running]
        running = [(seed, strategy) for seed, strategy, plan in planned if plan is not None]
        plans = [plan for _, _, plan in planned if plan is not None]
        if params.follows_load:
            applicants = [
                Applicant(params, s.is_stuck, placement.costs(p)) for (_, s), p in zip(running, plans, strict=True)
            ]
            counts = allotment.choose(applicants)
            plans = [s.keep(p, k) for (_, s), p, k in zip(running, plans, counts, strict=True)]
        if plans:
            seconds += costs.seconds(sum(placement.demand(plan).num_computed for plan in plans))
        for i, ((seed, strategy), plan) in enumerate(zip(running, plans, strict=True)):
            record = strategy.absorb(plan, results(plan, strategy, seed), 0, 0)
            if params.follows_load:
                allotment.learn(applicants[i], record)
    return seconds


def device_costs(device: Device) -> StepCosts:
    """The planner's cost of a step of Dream-7B, by the tokens that it computes."""
    model = load_model("Dream-7B")
    sizes = [32 * 2**power for power in range(12)]
    return StepCosts((size, predict(model, device, Workload(k=0, window=size, context=0)).step) for size in sizes)


@pytest.mark.parametrize("acceptance", ["verified", "exact"])
@pytest.mark.parametrize("num_requests", slow_but([1, 3, 8], [1, 3]))
def test_auto_is_as_fast_as_the_best_fixed_number_on_a_simulated_device(num_requests: int, acceptance: str) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 64, "tau_conf": 0.8, "branch_acceptance": acceptance}
    costs = device_costs(load_device("910c"))
    seconds = {k: simulate(num_requests, DecodingParams(num_branches=k, **fields), costs) for k in SIMULATED}
    auto = simulate(num_requests, DecodingParams(num_branches="auto", **fields), costs)
    assert auto < 1.03 * min(seconds.values())
    assert max(seconds.values()) > 1.05 * min(seconds.values())  # the choice matters
