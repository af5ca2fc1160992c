"""Windows, seats and groups of compiled steps. A graph is the step as it is, not compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import GraphParams
from lopa_ascend.graph import setup
from tests.e2e.batching import one_at_a_time, run
from tests.e2e.test_graph import engine
from tests.tiers import slow_but
from tests.tiny import write_dream


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=3, hidden=64, heads=4, kv_heads=2))


@pytest.mark.parametrize("block_size", slow_but([4, 6], [6]))
def test_a_request_that_comes_back_to_graphs_goes_on_from_where_eager_steps_left_it(path: str, block_size: int) -> None:
    """Its window first outgrows the graphs; later blocks are decoded in graphs again."""
    params = DecodingParams(block_size=block_size, tau_conf=1.0, tau_add=0.2, max_new_tokens=48, ignore_eos=True)
    asked = [([5, 6, prompt], replace(params, num_branches=prompt % 3)) for prompt in range(10, 22)]
    served = engine(path, graph_window_blocks=2, graph_params=GraphParams(num_branches=5, block_size=6))
    outputs = run(served, asked)
    expected = run(engine(path, graph_mode="eager"), asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    graphs = served.runner.graphs
    assert graphs is not None
    assert graphs.stats().eager_steps.get("graph_window_blocks")
    assert graphs.seats.num_taken > len(asked)


def test_sequences_fill_the_largest_buckets_one_after_the_other(path: str) -> None:
    """Buckets of 10 sequences would have more tokens than a step may compute; those of 4 have not. So a step of all has
    4, 4 and 2 sequences."""
    served = engine(
        path,
        max_num_seqs=10,
        max_num_batched_tokens=500,
        graph_params=GraphParams(num_branches=7, block_size=4),
        graph_window_blocks=2,
    )
    one_at_a_time(served)
    params = DecodingParams(decoding="d2f", block_size=4, max_active_blocks=1, max_new_tokens=16, ignore_eos=True)
    outputs = run(served, [([5, 6, 7], params)] * 10)
    stats = served.stats()
    assert stats.graphs is not None
    assert not stats.graphs.eager_steps
    (num_forwards,) = {output.num_forwards for output in outputs}
    num_decode_steps = stats.num_steps - stats.num_prefill_steps
    assert 3 * (num_forwards - 1) <= stats.graphs.num_steps <= 3 * num_decode_steps
    assert stats.idle_rows == 7 * 10 * (num_forwards - 1)


@pytest.mark.parametrize("ahead", slow_but([True, False], [True]))
def test_windows_that_no_graph_holds_have_as_many_branches_as_an_eager_step_may_compute(path: str, ahead: bool) -> None:
    options = {"max_num_batched_tokens": 400, "graph_params": GraphParams(num_branches=7, block_size=16)}
    params = DecodingParams(
        num_branches=7, block_size=16, max_new_tokens=80, tau_conf=1.0, tau_add=0.1, ignore_eos=True
    )
    asked = [([5 + n, 6, 7], params) for n in range(3)]
    served = engine(path, **options)
    if not ahead:
        one_at_a_time(served)
    outputs = run(served, asked)
    expected = run(engine(path, graph_mode="eager", **options), asked)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    stats = served.stats().graphs
    assert stats is not None
    assert stats.num_steps
    assert stats.eager_steps["graph_window_blocks"]
    numbers = {len(record.branches) for output in outputs for record in output.trace or ()}
    assert max(numbers) == 8
    assert min(numbers - {1}) < 8


def test_the_memory_of_graphs_holds_states_and_inputs(path: str) -> None:
    graphs = engine(path).runner.graphs
    assert graphs is not None
    storage = graphs.seats.storage
    own = storage.states.nbytes + storage.hidden.nbytes + graphs.inputs.tensor.nbytes
    assert graphs.stats().memory > own
