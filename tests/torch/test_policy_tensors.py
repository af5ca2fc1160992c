"""The policy as tensor functions does what decode/ defines.

More examples: LOPA_POLICY_EXAMPLES=20000 pytest tests/torch/test_policy_tensors.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lopa_ascend.config import DecodingParams, GraphParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.graph import inputs, policy, support, tensors
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import HostView
from lopa_ascend.graph.policy import Predicted
from lopa_ascend.graph.window import block_rows, next_window, num_blocks
from lopa_ascend.types import DREAM, ModelProperties
from tests.tiers import examples
from tests.torch.policy_driver import LENGTH, MASK, Batch, Given, Sequence, answer, constants_of

EXAMPLES = int(os.environ.get("LOPA_POLICY_EXAMPLES", examples(200)))

fractions = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0])
PROPERTIES = [DREAM, *(ModelProperties(logit_shift=shift, attention="block_causal") for shift in (0, 1))]
requests = st.fixed_dictionaries(
    {
        "num_branches": st.integers(0, 7),
        "block_size": st.integers(1, LENGTH),
        "max_new_tokens": st.integers(1, 24),
        "tau_add": fractions,
        "tau_act": fractions,
        "tau_conf": fractions,
        "max_active_blocks": st.sampled_from([None, None, 1, 2, 3]),
        "ignore_eos": st.booleans(),
        "finish_at_eos": st.booleans(),
    }
)
# Of each: the length of its prompt, and how many steps decode/ takes alone before the tensors take over.
batches = st.lists(st.tuples(requests, st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=3)


@pytest.mark.parametrize("branch_acceptance", ["published", "verified", "exact"])
@settings(max_examples=EXAMPLES)
@given(
    batch=batches,
    seed=st.integers(0, 10**9),
    late=st.booleans(),
    size=st.sampled_from([1, 1, 2, 3]),
    properties=st.sampled_from(PROPERTIES),
)
def test_every_step_is_what_decode_makes_of_it(
    branch_acceptance: str, batch: list, seed: int, late: bool, size: int, properties: ModelProperties
) -> None:
    if branch_acceptance == "exact":  # graphs do not take 0
        batch = [({**request, "tau_add": request["tau_add"] or 0.01}, *rest) for request, *rest in batch]
    for _ in Batch(batch, seed, late, size, branch_acceptance, properties).run():
        pass


@settings(max_examples=EXAMPLES)
@given(
    request=requests,
    prompt=st.integers(1, 300),
    seed=st.integers(0, 10**9),
    branch_acceptance=st.sampled_from(["published", "verified", "exact"]),
    properties=st.sampled_from(PROPERTIES),
)
def test_no_more_slots_compute_a_block_than_the_host_foresees(
    request: dict, prompt: int, seed: int, branch_acceptance: str, properties: ModelProperties
) -> None:
    """A step before, while it does not know the winner."""
    rng = random.Random(seed)
    if branch_acceptance == "exact":
        request = {**request, "tau_add": request["tau_add"] or 0.01}
    request = {**request, "branch_acceptance": branch_acceptance}
    strategy = Sequence(rng, properties, request, prompt, 0).strategy
    sizes = {"slots": 1 + strategy.params.lookaheads, "num_groups": 1}
    foreseen = None
    while (plan := strategy.plan()) is not None:
        running: Any = SimpleNamespace(strategy=strategy, next_pass=plan)
        window = next_window(running, in_flight=False)
        needed = block_rows(running, window, in_flight=False, **sizes)
        own_blocks = [num_blocks(strategy, row.compute_from) for row in plan.rows[:-1]]
        assert sum(needed) == len(window) + sum(window.stop - block for block in own_blocks)
        if foreseen is not None:
            assert window.start == foreseen[0].start
            assert len(needed) <= len(foreseen[1])
            assert all(count <= most for count, most in zip(needed, foreseen[1], strict=False))
        ahead = next_window(running, in_flight=True)
        foreseen = ahead, block_rows(running, ahead, in_flight=True, **sizes)
        strategy.absorb(plan, [answer(rng, len(row.masked)) for row in plan.rows], 0, 0)


def test_no_exact_branch_wins_that_has_opened_fewer_blocks_than_the_anchor() -> None:
    """One that holds an EOS opens none."""
    request = {"num_branches": 6, "block_size": 3, "max_new_tokens": 24, "tau_conf": 1.0, "finish_at_eos": False}
    num_won = 0
    for seed in range(40):
        for _, record in Batch([(request, 5, 1)], seed, seed % 2 == 0, 1, "exact").run():
            num_won += record.winner < len(record.branches) - 1
    assert num_won > 10


@pytest.mark.parametrize("branch_acceptance", ["published", "verified", "exact"])
def test_what_was_not_finite_is_noticed_by_no_other_sequence(branch_acceptance: str) -> None:
    request = {"num_branches": 2, "block_size": 3, "max_new_tokens": 8, "tau_conf": 1.0}
    after = []
    for bad in (0.5, float("nan"), float("inf")):
        batch = Batch([(request, 5, 2)] * 3, 0, False, 1, branch_acceptance)
        _, _, given = batch.launch()
        launch, params = given.launch, given.params
        constants = constants_of(batch.bucket, batch.first_padding_position)
        state = policy.unpack_state(batch.storage, launch, batch.bucket.max_cells)
        rows = policy.branch_rows(state, launch, params, constants)
        predicted, _ = batch.predict(rows)
        predicted.max_probs[1], predicted.confidences[1] = bad, bad
        state, winner = policy.advance(rows, predicted, launch, params, constants, branch_acceptance)
        assert bool(((winner >= 0) & (winner < rows.tokens.shape[1])).all())
        cells = state.lookahead_cells[1]
        assert bool(((cells < 0) | torch.isin(cells, launch.cells[1])).all())
        after.append([x[::2] for x in (winner, *state)])
    for other in after[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, after[0], strict=True))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (DecodingParams(), None),
        (DecodingParams(decoding="d2f", block_size=8, max_active_blocks=2), None),
        (DecodingParams(temperature=0.5, top_k=3), "temperature"),
        (DecodingParams(window_attention="full"), "window_attention"),
        (DecodingParams(confidence="margin"), "confidence"),
        (DecodingParams(acceptance="factor"), "acceptance"),
        (DecodingParams(branch_acceptance="exact"), "branch_acceptance"),
        (DecodingParams(branch_score="tail"), "branch_score"),
        (DecodingParams(branch_score="window"), "branch_score"),
        (DecodingParams(num_branches="auto"), "num_branches"),
        (DecodingParams(base="parallel"), "base"),
        (DecodingParams(base="fast_dllm"), "base"),
        (DecodingParams(decoding="fast_dllm"), "decoding"),
        (DecodingParams(creation_weight=0.5), "creation_weight"),
        (DecodingParams(min_new_tokens=1), "min_new_tokens"),
        (DecodingParams(num_branches=4), "num_branches"),
        (DecodingParams(block_size=33), "block_size"),
    ],
)
def test_what_graphs_cannot_do_is_named(request_: DecodingParams, field: str | None) -> None:
    shape = Bucket(1, 2, 1, 4, 4, 32, 8)
    assert support.unsupported(request_, 2, shape, GraphParams()) == field


@pytest.mark.parametrize(
    ("asked", "compiled", "field"),
    [
        ({"branch_acceptance": "verified"}, "verified", None),
        ({"branch_acceptance": "exact"}, "exact", None),
        ({"branch_acceptance": "exact"}, "verified", "branch_acceptance"),
        ({}, "exact", "branch_acceptance"),
        ({"num_branches": 0}, "exact", None),
        ({"num_branches": 0, "branch_acceptance": "exact", "tau_add": 0.0}, "exact", None),
        ({"decoding": "d2f"}, "verified", None),
        ({"branch_acceptance": "verified", "tau_add": 0.0}, "verified", None),
        ({"branch_acceptance": "exact", "tau_add": 0.0}, "exact", "tau_add"),
        ({"branch_acceptance": "verified", "lookahead_depth": 2}, "verified", "lookahead_depth"),
        ({"branch_acceptance": "exact", "num_branches": "auto"}, "exact", "num_branches"),
    ],
)
def test_graphs_decode_the_branch_acceptance_that_they_are_compiled_for(
    asked: dict[str, Any], compiled: str, field: str | None
) -> None:
    shape = Bucket(1, 2, 1, 4, 4, 32, 8)
    assert support.unsupported(DecodingParams(**asked), 2, shape, GraphParams(branch_acceptance=compiled)) == field


def test_exact_with_auto_gets_the_branches_that_there_is_room_for() -> None:
    shape, exact = Bucket(1, 2, 1, 4, 4, 32, 8), GraphParams(branch_acceptance="exact")
    auto = DecodingParams(num_branches="auto", branch_acceptance="exact")
    assert support.with_fixed_branches(auto, 2, shape, exact).num_branches == 3
    small = shape._replace(branches=3, slots=3)
    assert support.with_fixed_branches(auto, 2, small, exact).num_branches == 2
    unchanged = [
        (auto.changed(branch_acceptance="verified"), exact, shape),
        (auto.changed(branch_acceptance="verified"), GraphParams(branch_acceptance="verified"), shape),
        (auto, GraphParams(), shape),
        (auto, exact, shape._replace(branches=1, slots=1)),
        (replace(auto, tau_add=0.0), exact, shape),
        (replace(auto, num_branches=2), exact, shape),
    ]
    for params, compiled, bucket in unchanged:
        assert support.with_fixed_branches(params, 2, bucket, compiled) is params


def test_more_eos_ids_than_a_graph_takes_are_named_unless_they_are_ignored() -> None:
    shape = Bucket(1, 2, 1, 4, 4, 32, 8)
    for ignored, reason in ((False, "eos_token_id"), (True, None)):
        params = DecodingParams(ignore_eos=ignored)
        ends = begin(SequenceStart([1], params, 99, frozenset(range(9)))).ends
        assert support.unsupported(params, len(ends), shape, GraphParams()) == reason


def test_stop_token_ids_take_the_same_room() -> None:
    shape = Bucket(1, 2, 1, 4, 4, 32, 8)
    for count, reason in ((6, None), (7, "stop_token_ids")):
        params = DecodingParams(stop_token_ids=tuple(range(10, 10 + count)))
        ends = begin(SequenceStart([1], params, 99, frozenset((1, 2)))).ends
        assert support.unsupported(params, len(ends), shape, GraphParams()) == reason


def kernels(sequences: int, branch_acceptance: str) -> Counter[str]:
    """The compute ops of a whole step's policy, traced without values: whoever reads one fails here."""
    bucket = Bucket(sequences, 4, 2, 8, 8, 32, 6)
    params = inputs.empty_params(sequences, MASK, bucket)
    memory = torch.empty(tensors.input_size(bucket), dtype=torch.int32)
    given = Given(*tensors.view_inputs(memory, bucket))
    pages = torch.zeros(sequences, 8, 2, dtype=torch.int32)
    views = [HostView(seat) for seat in range(sequences)]
    inputs.write_inputs(given, bucket, views, pages, params, first_padding_position=0)
    storage = inputs.empty_states(9, bucket)
    predicted = Predicted(torch.zeros(sequences, 8, 128, dtype=torch.int32), *torch.rand(2, sequences, 8, 128))

    def step(storage, params, launch, predicted, constants):
        state = policy.unpack_state(storage, launch, bucket.max_cells)
        rows = policy.branch_rows(state, launch, params, constants)
        after, winner = policy.advance(rows, predicted, launch, params, constants, branch_acceptance)
        written = policy.rows_of_group(rows, launch, constants, 1, 0, full_attention=False)
        return written, policy.pack_state(after, bucket.max_cells), winner

    traced = make_fx(step, tracing_mode="fake")(storage, given.params, given.launch, predicted, constants_of(bucket, 0))
    ops = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    return Counter(str(op) for op in ops if isinstance(op, torch._ops.OpOverload) and not op.is_view)


@pytest.mark.parametrize(("branch_acceptance", "most"), [("published", 90), ("verified", 109), ("exact", 130)])
def test_the_number_of_kernels_is_small_and_does_not_grow_with_the_sequences(branch_acceptance: str, most: int) -> None:
    found = kernels(1, branch_acceptance)
    assert found.total() <= most
    assert found == kernels(5, branch_acceptance)
    # Not for a compiled step: shapes that depend on values, ties in an order of the kernel's own, AICPU kernels.
    assert not any(
        word in op for op in found for word in ("nonzero", "masked_select", "item", "sort", "scatter", "amin")
    )
