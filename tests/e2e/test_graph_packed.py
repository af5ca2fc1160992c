"""Packed buckets compute what full ones compute, with fewer tokens. A graph is the step as it is, not compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager, GraphError
from lopa_ascend.config import GraphParams
from lopa_ascend.core import Request, Sequence
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import executor as graph_executor
from lopa_ascend.graph import policy, setup, window
from lopa_ascend.graph.inputs import HostView
from lopa_ascend.graph.launcher import Launcher
from lopa_ascend.graph.tensors import view_output
from lopa_ascend.graph.window import cells_of, num_blocks
from tests import golden
from tests.e2e.batching import decisions, one_at_a_time, run
from tests.e2e.test_graph import engine, mixed
from tests.tiers import slow_but
from tests.tiny import write_dream

PARAMS = DecodingParams(block_size=8, max_new_tokens=64, tau_conf=0.9, tau_add=0.2, ignore_eos=True, num_branches=5)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_dream(tmp_path_factory.mktemp("model"), eos_token_id=3, hidden=64, heads=4, kv_heads=2))


class Compared:
    """Launches the full bucket beside every packed one that an engine launches, with the same states, keys and values,
    and compares all that a later step or the host reads."""

    def __init__(self, served: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert served.runner.graphs is not None
        self.graphs = served.runner.graphs
        self.launches: Counter[bool] = Counter()
        self.computed, self.saved = 0, 0
        """Tokens that packed buckets computed, and that the full ones beside them would have computed in addition."""
        self._launch = Launcher.launch
        monkeypatch.setattr(Launcher, "launch", lambda *given: self.launch(*given))

    def launch(self, launcher: Launcher, sequences: list[Any], *given: Any):
        bucket = launcher.bucket
        self.launches[bucket.rows is not None] += 1
        if bucket.rows is None:
            return self._launch(launcher, sequences, *given)
        memory = *self.graphs.seats.storage, self.graphs.pool.caches
        before = [x.clone() for x in memory]
        full = self.graphs.launchers[bucket._replace(rows=None)]
        self.computed += bucket.tokens
        self.saved += full.bucket.tokens - bucket.tokens
        outputs, kept = [], []
        for each in (full, launcher):
            for x, old in zip(memory, before, strict=True):
                x.copy_(old)
            num_columns = self.graphs.graphs.score.num_columns
            outputs.append(view_output(self._launch(each, sequences, *given)().clone(), bucket, num_columns))
            kept.append([self.later(sequence, view) for sequence, view in zip(sequences, given[0], strict=True)])
        count = len(sequences)
        for expected, found in zip(*(output[:2] for output in outputs), strict=True):
            assert torch.equal(expected[:count], found[:count])
        for expected, found in zip(*kept, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
        for index, (sequence, view) in enumerate(zip(sequences, given[0], strict=True)):
            if self.graphs.graphs.ahead:
                continue  # the host does not know the rows
            for branch, row in enumerate(sequence.next_pass.rows):
                cells = cells_of(sequence, view.window_start, bucket.block_length, np.array(row.masked, np.int64))
                for expected, found in zip(*(output[2:] for output in outputs), strict=True):
                    assert torch.equal(expected[index, branch, cells], found[index, branch, cells])
        return lambda: self.raw(launcher, outputs[1])

    def raw(self, launcher: Launcher, output) -> torch.Tensor:
        columns = output[: 2 + self.graphs.graphs.score.num_columns]
        return torch.cat([x.reshape(-1).view(torch.int32) for x in columns])

    def later(self, sequence: Sequence, view: HostView) -> list[torch.Tensor]:
        """What later steps read of a sequence: its state; keys, values and hidden states of what is committed; and keys
        and values that its open blocks have in all slots."""
        graphs, strategy, plan = self.graphs, sequence.strategy, sequence.next_pass
        kept = self.state(view)
        if graphs.graphs.ahead:  # the host does not know the rows
            return kept
        tables = sequence.page_tables.by_slot
        places = [(table, row.end) for table, row in zip(tables, plan.rows, strict=False)]
        if plan.num_new:
            last = num_blocks(strategy, plan.start + plan.num_new)
            kept.append(graphs.seats.storage.hidden[graphs.seats.hidden_row(sequence, last)].clone())
            places = [(table, plan.start + plan.num_new) for table in tables]
        return kept + [graphs.pool.read(table, plan.start, end) for table, end in places]

    def state(self, view: HostView) -> list[torch.Tensor]:
        """The state of a sequence, of the guesses those of lookahead cells."""
        shape = self.graphs.graphs.shape
        sizes = shape.max_cells, shape.max_cells, shape.branches, shape.branches
        packed = self.graphs.seats.storage.states[view.seat].view(torch.int32).clone()
        tokens, guesses, opened, cells = packed.split(sizes)
        return [tokens, guesses[cells[cells >= 0] - view.window_start * shape.block_length], opened, cells]


@pytest.mark.parametrize(
    ("seed", "ahead", "confidence"),
    slow_but(
        [
            (seed, ahead, confidence)
            for seed in range(3)
            for ahead in (True, False)
            for confidence in ("max_prob", "margin")
        ],
        [(0, False, "max_prob"), (1, True, "margin")],
    ),
)
def test_they_compute_what_full_buckets_compute(
    path: str, seed: int, ahead: bool, confidence: str, monkeypatch
) -> None:
    asked, arrivals = mixed(seed, 10, "block_causal", confidence)
    served = engine(path, graph_window_blocks=4, graph_params=GraphParams(num_branches=5, confidence=confidence))
    if not ahead:
        one_at_a_time(served)
    compared = Compared(served, monkeypatch)
    run(served, asked, arrivals)
    assert compared.launches[True] > 0.3 * compared.launches.total()
    assert compared.saved > 0.2 * compared.computed


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("case", [case for case in golden.CASES if case.startswith("lopa") and "causal" in case])
def test_golden_traces_through_packed_steps(case: str, ahead: bool, monkeypatch) -> None:
    trace = golden.read(case)
    params = golden.decoding_params(trace)
    compiled = GraphParams(params.lookaheads, params.block_size, confidence=params.confidence)
    served = engine(
        str(golden.model_path(trace)), graph_params=compiled, enable_prefix_caching=False, max_model_len=None
    )
    if not ahead:
        one_at_a_time(served)
    compared = Compared(served, monkeypatch)
    (output,) = run(served, [(trace["prompt_ids"], params)])
    assert list(output.token_ids) == trace["output_ids"]
    assert [record.winner for record in output.trace or ()] == [r["winner"] for r in golden.rounds(trace)]
    assert compared.launches[True] > 0
    assert compared.saved > 0


def test_neighbours_change_nothing(path: str) -> None:
    asked = [([5, 6, prompt], replace(PARAMS, num_branches=prompt % 6)) for prompt in range(7, 13)]
    together = run(engine(path, graph_params=GraphParams(num_branches=5, block_size=8)), asked)
    for request, output in zip(asked, together, strict=True):
        alone = run(engine(path, graph_params=GraphParams(num_branches=5, block_size=8)), [request])
        assert decisions(alone[0]) == decisions(output)


def test_branches_that_there_is_no_room_for_fail_their_request(path: str, monkeypatch) -> None:
    """The host counts again what the device had to compute, once it knows."""

    def too_few(sequence, blocks, *, in_flight, **sizes):
        counts = window.block_rows(sequence, blocks, in_flight=in_flight, **sizes)
        return (1,) * len(counts) if in_flight else counts

    monkeypatch.setattr(graph_executor, "block_rows", too_few)
    monkeypatch.setattr("lopa_ascend.graph.launcher.filled_up", lambda counts, _: counts)
    served = engine(path, graph_params=GraphParams(num_branches=5, block_size=8))
    served.add(Request("bad", (5, 6, 7), PARAMS))
    errors = []
    while served.has_work():
        errors += [update.error for update in served.step() if update.error]
    assert len(errors) == 1
    assert "no room for all branches" in errors[0]


class Checked(Eager):
    """Its graphs are compared with their steps at start, and find their block-rows by ``found``."""

    mode = "checked"

    def __init__(self, found: Callable[[policy.Layout], policy.Layout]) -> None:
        super().__init__()
        self._found = found

    def _compile(self, step, name, tensors, kv_lengths):
        def run(kv_lengths):
            with mock.patch.object(policy, "layout", lambda *given: self._found(layout(*given))):
                return step(tensors, kv_lengths)

        layout = policy.layout
        return run


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (lambda found: found, True),
        (lambda found: found._replace(slots=found.slots.roll(1)), False),
        (lambda found: found._replace(blocks=found.blocks.roll(1)), False),
        (lambda found: found._replace(rows=found.rows.roll(-1)), False),
    ],
    ids=["right", "slots", "blocks", "rows"],
)
def test_a_graph_with_wrong_block_rows_is_refused_at_start(path: str, found, is_right: bool, monkeypatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Checked(found))
    with nullcontext() if is_right else pytest.raises(GraphError, match="_rows.*does not compute what its step"):
        served = engine(path, graph_window_blocks=2, max_num_seqs=1)
        assert any(bucket.rows is not None for bucket in served.runner.graphs.launchers)


@pytest.mark.parametrize("pays", [True, False])
def test_steps_are_read_first_where_fewer_block_rows_save_more_than_the_host_takes(
    path: str, pays, monkeypatch
) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Checked(lambda found: found))
    monkeypatch.setattr(Launcher, "seconds", lambda launcher: launcher.bucket.tokens * (1.0 if pays else 1e-9))
    served = engine(path, graph_window_blocks=2, max_num_seqs=1)
    assert served.runner.graphs.graphs.ahead == (not pays)
    (output,) = run(served, [([5, 6, 7], PARAMS)])
    (expected,) = run(engine(path, graph_mode="eager"), [([5, 6, 7], PARAMS)])
    assert output.token_ids == expected.token_ids
