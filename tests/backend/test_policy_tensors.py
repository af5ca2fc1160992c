"""The policy as tensor functions does what decode/ defines: both are driven side by side with random predictions.

More examples: LOPA_POLICY_EXAMPLES=20000 pytest tests/backend/test_policy_tensors.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lopa_ascend import policy
from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.blocks import BlockState, threshold_count
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.layout import lay_out
from lopa_ascend.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.policy import Bucket, Known, Launch, Outcome, Params, Predicted, Progress, Rows, State
from lopa_ascend.types import RowResult, SequencePlan, SequenceStep, StepRecord

EXAMPLES = int(os.environ.get("LOPA_POLICY_EXAMPLES", "200"))
MASK, EOS, VOCAB = 50, (7, 9), 40
LENGTH, CAPACITY = 6, 26  # the longest block, and as many blocks as a window can have here
tables = cache(policy.tables_for)

fractions = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.95, 1.0])
requests = st.fixed_dictionaries(
    {
        "num_branches": st.integers(0, 7),
        "block_size": st.integers(1, LENGTH),
        "max_new_tokens": st.integers(1, 24),
        "tau_add": fractions,
        "tau_act": fractions,
        "tau_conf": fractions,
        "max_active_blocks": st.sampled_from([None, None, 1, 2, 3]),
        "window_attention": st.sampled_from(["block_causal", "block_causal", "full"]),
        "ignore_eos": st.booleans(),
        "finish_at_eos": st.booleans(),
    }
)
# Of each: the length of its prompt, and how many steps decode/ takes alone before the tensors take over.
batches = st.lists(st.tuples(requests, st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=3)

GRIDS: tuple[Callable[[random.Random], float], ...] = (
    lambda rng: rng.choice([0.25, 0.5, 0.75]),  # ties everywhere
    lambda rng: rng.choice([0.1, 0.25, 0.5, 0.75, 0.95, 1.0]),  # on the thresholds
    lambda rng: (rng.randrange(8) + 0.5) * policy.STEP,
    lambda rng: rng.choice([-12.0, -0.5, -0.0, 0.0]),
    lambda rng: rng.random(),
    lambda rng: -12 * rng.random(),
)


def answer(rng: random.Random, length: int) -> RowResult:
    """Random predictions of so many positions; one token in twenty is an EOS, or one in three."""
    often = rng.choice([0.05, 0.05, 0.3])
    tokens = [rng.choice(EOS) if rng.random() < often else rng.randrange(VOCAB) for _ in range(length)]
    probs, confs = (np.array([grid(rng) for _ in tokens], np.float32).tolist() for grid in rng.choices(GRIDS, k=2))
    return RowResult(tuple(tokens), tuple(probs), tuple(confs))


class Seen(NamedTuple):
    """Blocks of a sequence before a step, as the host sees them; ``caps`` as in Known."""

    settled: int
    opened: int
    caps: int


class Sequence:
    """One sequence: its strategy, and what the host keeps of it."""

    def __init__(self, rng: random.Random, request: dict, prompt: int, steps: int):
        decoding = "lopa" if request["num_branches"] else "d2f"
        self.params = DecodingParams(decoding=decoding, **request)
        self.size = self.params.block_size
        text = [rng.randrange(VOCAB) for _ in range(prompt)]
        self.strategy: D2F = begin(text, self.params, MASK, frozenset(EOS), 0 if steps else prompt)
        for _ in range(steps):
            plan = self.strategy.plan()
            if plan is None:
                break
            self.strategy.absorb(plan, [answer(rng, len(row.masked)) for row in plan.rows], 0, 0)
        now = self.look()
        committed = sum(block.state is BlockState.IN_CACHE for block in self.blocks)
        self.seen = [Seen(committed, now.opened, now.caps), now]
        self.first = [committed]
        self.text = [MASK] * self.params.max_new_tokens
        self.text[: len(self.strategy.winner.tokens)] = self.strategy.winner.tokens

    @property
    def blocks(self):
        """The anchor's generated blocks."""
        return self.strategy.branches[-1].blocks[1:]

    def look(self) -> Seen:
        """After ``absorb``, before ``plan``."""
        anchor, opened = self.strategy.branches[-1], len(self.blocks)
        settled = sum(block.state is not BlockState.ACTIVE for block in self.blocks)
        return Seen(settled, opened, opened if anchor.eos else -(-self.params.max_new_tokens // self.size))

    def cell(self, position: int) -> int:
        at = position - len(self.strategy.prompt)
        return at // self.size * LENGTH + at % self.size

    def position(self, cell: int) -> int:
        block, offset = divmod(cell, LENGTH)
        return len(self.strategy.prompt) + block * self.size + offset

    def cells(self, blocks: range) -> list[int]:
        """Those that hold a position."""
        inside = [(block * LENGTH + i, block * self.size + i) for block in blocks for i in range(self.size)]
        return [cell for cell, at in inside if at < self.params.max_new_tokens]

    def seat(self, params: Params, state: State, row: int) -> None:
        """Takes the sequence over from its strategy."""
        tau = self.params.tau_add, self.params.tau_act
        policy.admit(params, row, self.params, EOS, *(threshold_count(t, self.size) for t in tau))
        *others, anchor = self.strategy.branches
        fills = [(branch.lookahead.position - len(self.strategy.prompt), branch.lookahead.token) for branch in others]
        policy.seat(params, state, row, self.params, self.first[0], anchor.tokens, fills)


class Batch:
    """Sequences under both policies. ``late``: a step is launched on what was known before the last one. ``size``
    branch-parallel groups."""

    def __init__(self, specs: list[tuple[dict, int, int]], seed: int, late: bool, size: int):
        self.rng, self.late, self.size = random.Random(seed), late, size
        self.sequences = [Sequence(self.rng, *spec) for spec in specs]
        branches = -(-max(1 + seq.params.lookaheads for seq in self.sequences) // size) * size
        self.bucket = Bucket(len(specs), branches, CAPACITY, LENGTH, CAPACITY)
        self.params, self.state = policy.empty(self.bucket, MASK, self.rng.choice([2, 3]))
        self.finish = torch.tensor([seq.params.finish_at_eos for seq in self.sequences])
        for row, seq in enumerate(self.sequences):
            seq.seat(self.params, self.state, row)
        self.plans = [seq.strategy.plan() for seq in self.sequences]
        self.held = CAPACITY
        self.present = {row for row, plan in enumerate(self.plans) if plan is not None}
        self.absent(set(range(len(specs))) - self.present)

    def absent(self, rows: set[int]) -> None:
        """Gives the rows of finished sequences up."""
        self.present -= rows
        for row in rows:
            self.state.ends[row] = self.state.lookaheads[row] = 0
            self.state.position[row] = -1

    def launch(self) -> tuple[Known, torch.Tensor, Launch]:
        """The next launch, with random page tables and a window of some blocks too many."""
        columns = [(0,) * 7] * len(self.sequences)
        blocks = -(-self.bucket.branches // LENGTH)
        for row in self.present:
            seq = self.sequences[row]
            first, seen = seq.seen[-2].settled, seq.seen[-2 if self.late else -1]
            blocks = max(blocks, min(seen.opened + 1 + self.late, seen.caps) - first)
            length, limit = len(seq.strategy.prompt), seq.params.max_new_tokens
            # What a step commits may be shared before it is written, where all branches write the same.
            early = not self.late and seq.params.window_attention == "block_causal"
            final = length + min((seq.seen[-1].settled if early else first) * seq.size, limit)
            shared = self.rng.randint(0, final // PAGE_SIZE)
            columns[row] = (length, seq.size, limit, first, seq.first[-1], seen.caps, shared)
            seq.first.append(first)
        known = Known(*(torch.tensor(column, dtype=torch.int32) for column in zip(*columns, strict=True)))
        self.bucket = self.bucket._replace(blocks=min(blocks + self.rng.choice([0, 0, 1, 3]), CAPACITY))
        slots = self.bucket.branches // self.size
        most = max(pages_for(length + limit) for length, _, limit, *_ in columns)
        pages = torch.tensor(self.rng.sample(range(len(columns) * slots * most), len(columns) * slots * most))
        pages = pages.view(len(columns), slots, most).to(torch.int32)
        for row, (*_, shared) in enumerate(columns):
            pages[row, 1:, :shared] = pages[row, :1, :shared]
            pages[row, -(-(1 + self.sequences[row].params.lookaheads) // self.size) :] = -1
        self.trash = pages.numel() * PAGE_SIZE
        return known, pages, policy.launch_for(self.bucket, known, self.held, pages, self.trash)

    def predict(self, rows: Rows) -> tuple[Predicted, list[list[RowResult]]]:
        """What a model may say, nonsense outside the masked cells. Half of the time branches agree where they can."""
        shape, noise = rows.tokens.shape, torch.Generator().manual_seed(self.rng.randrange(2**31))
        tokens = torch.randint(0, VOCAB, shape, dtype=torch.int32, generator=noise)
        probs = torch.rand(shape, generator=noise)
        confs = torch.full(shape, self.rng.choice([float("nan"), -100.0, 100.0]))
        results: list[list[RowResult]] = [[] for _ in self.sequences]
        for row in range(shape[0]):
            common = answer(self.rng, shape[2]) if self.rng.random() < 0.5 else None
            for branch in range(shape[1]):
                at = rows.masked[row, branch].nonzero()[:, 0]
                columns = astuple(common or answer(self.rng, len(at)))
                if common is not None:
                    columns = tuple(tuple(column[i] for i in at) for column in columns)
                for x, column in zip((tokens, probs, confs), columns, strict=True):
                    x[row, branch, at] = torch.tensor(column, dtype=x.dtype)
                results[row].append(RowResult(*columns))
        return Predicted(tokens, probs, confs), results

    def run(self) -> Iterator[tuple[int, StepRecord]]:
        """Steps until everything is done, comparing all there is; yields (sequence, record)."""
        done: set[int] = set()
        while self.present:
            known, pages, launch = self.launch()
            constants = tables(self.bucket)
            rows = policy.lay_out(self.params, self.state, launch, constants)
            for row in self.present - done:
                self.compare_rows(row, launch, rows)
            self.compare_writes(known, pages, launch, rows, self.present - done)
            predicted, results = self.predict(rows)
            self.state, outcome = policy.advance(self.params, launch, rows, predicted, constants)
            progress = policy.progress(self.params, self.finish, known, launch, self.state, outcome)
            self.held = self.bucket.blocks
            assert not progress.failed.any()
            gone = set(done)
            for row in self.present - gone:
                plan, strategy = self.plans[row], self.sequences[row].strategy
                assert plan is not None
                record = strategy.absorb(plan, results[row][: len(plan.rows)], 0, 0)
                self.compare_outcome(row, launch, outcome, record)
                self.sequences[row].seen.append(self.sequences[row].look())
                self.compare_state(row, launch, outcome)
                self.plans[row] = strategy.plan()
                self.compare_progress(row, launch, progress)
                done |= {row} if self.plans[row] is None else set()
                yield row, record
            self.absent(gone if self.late else done)  # launched late, a finished sequence is computed once more

    def compare_rows(self, row: int, launch: Launch, rows: Rows) -> None:
        seq, plan = self.sequences[row], self.plans[row]
        assert plan is not None
        cells, first = launch.cells[row].tolist(), seq.first[-1]
        assert int(self.state.lookaheads[row]) == len(plan.rows) - 1
        for b, expected in enumerate(plan.rows):
            assert expected.start == seq.position(first * LENGTH)
            opened = int(rows.ends[row, b])
            inside = [cells.index(cell) for cell in seq.cells(range(first, opened))]
            positions = launch.positions[row, inside].tolist()
            assert positions == list(range(expected.start, expected.end))
            assert rows.tokens[row, b, inside].tolist() == list(expected.tokens)
            masked = rows.masked[row, b].nonzero()[:, 0]
            assert launch.positions[row, masked].tolist() == list(expected.masked)
            before = [expected.start - 1, *launch.positions[row].tolist()]
            assert [before[c] for c in launch.source[row, inside].tolist()] == [p - 1 for p in positions]
            if seq.params.window_attention == "block_causal":
                assert tuple(launch.kv_lengths[row, : opened - first].tolist()) == expected.edges
            activated = rows.previous[row, b] <= self.params.slack[row]
            blocks = seq.strategy.branches[b].blocks[1 + first :]
            assert activated[: len(blocks)].tolist() == [block.activated for block in blocks]

    def compare_writes(self, known: Known, pages: torch.Tensor, launch: Launch, rows: Rows, present: set[int]) -> None:
        for group in range(self.size):
            tokens, at = policy.writes(rows, launch, self.size, group)
            assert len(set(at.flatten().tolist())) == at.numel()
            assert int(at.max()) < self.trash + at.numel()
            for row in present:
                plan = self.plans[row]
                assert plan is not None
                if plan.winner_commits and self.size > 1:
                    continue  # full windows and several groups do not meet in a graph
                found = {
                    where: (position, token)
                    for slot in range(len(plan.rows) if plan.winner_commits else at.shape[1])
                    for where, position, token in zip(
                        at[row, slot].tolist(), launch.positions[row].tolist(), tokens[row, slot].tolist(), strict=True
                    )
                    if where < self.trash
                }
                assert found == expected_writes(plan, pages[row], int(known.shared[row]), self.size, group)

    def compare_outcome(self, row: int, launch: Launch, outcome: Outcome, record: StepRecord) -> None:
        seq = self.sequences[row]
        assert int(outcome.winner[row]) - row * self.bucket.branches == record.winner
        at = outcome.filled[row].nonzero()[:, 0]
        columns = launch.positions, outcome.tokens, outcome.max_probs, outcome.confidences
        found = zip(*(x[row, at].tolist() for x in columns), strict=True)
        assert sorted(found) == sorted((f.position, f.token, f.max_prob, f.confidence) for f in record.fills)
        for b, branch in enumerate(record.branches):
            deficit, count = int(outcome.deficits[row, b]), int(outcome.counts[row, b])
            assert count == branch.masks
            if seq.params.decoding == "lopa":
                assert float(1 - Fraction(deficit, count << 16) if count else 1) == branch.score

    def compare_state(self, row: int, launch: Launch, outcome: Outcome) -> None:
        seq, state = self.sequences[row], self.state
        branches, now = seq.strategy.branches, seq.seen[-1]
        assert int(state.ends[row]) == now.opened
        assert int(state.lookaheads[row]) == len(branches) - 1
        for b in range(self.bucket.branches):
            fill = branches[b].lookahead if b < len(branches) else None
            assert int(state.position[row, b]) == (-1 if fill is None else seq.cell(fill.position))
            assert fill is None or int(state.token[row, b]) == fill.token
        cells = launch.cells[row].tolist()
        for i, token in enumerate(branches[-1].tokens, len(seq.strategy.prompt)):
            if seq.cell(i) >= cells[0]:
                assert int(state.tokens[row, cells.index(seq.cell(i))]) == token

    def compare_progress(self, row: int, launch: Launch, progress: Progress) -> None:
        seq, cells = self.sequences[row], launch.cells[row].tolist()
        assert bool(progress.done[row]) == (self.plans[row] is None)
        assert int(progress.settled[row]) == seq.seen[-1].settled
        for cell in seq.cells(range(seq.first[-1], seq.seen[-1].opened)):
            seq.text[seq.position(cell) - len(seq.strategy.prompt)] = int(progress.tokens[row, cells.index(cell)])
        winner = seq.strategy.winner.tokens
        assert (
            seq.text[: len(winner)]
            == (winner if self.plans[row] is None else seq.strategy.branches[-1].tokens)[: len(winner)]
        )


def expected_writes(plan: SequencePlan, pages: torch.Tensor, shared: int, size: int, group: int) -> dict:
    """{cache position: (position, token)} as the eager step writes them."""
    share = Placement(size, group).share(plan)
    if not share.rows:
        return {}
    layout = lay_out([(share, SequenceStep("", tuple(map(tuple, pages.tolist())), shared))])
    positions, tokens = layout.positions[layout.source], layout.tokens[layout.source]
    return dict(zip(layout.slots.tolist(), zip(positions.tolist(), tokens.tolist(), strict=True), strict=True))


@settings(max_examples=EXAMPLES)
@given(batches, st.integers(0, 10**9), st.booleans(), st.sampled_from([1, 1, 2, 3]))
def test_every_step_is_what_decode_makes_of_it(batch, seed: int, late: bool, size: int) -> None:
    for _ in Batch(batch, seed, late, size).run():
        pass


def step(batch: Batch, confidences: list[float], tokens: list[list[int]]) -> tuple[Predicted, Callable[[], Progress]]:
    """The next step, in which all branches predict the same; what is predicted can be changed before it is taken."""
    known, _, launch = batch.launch()
    constants = tables(batch.bucket)
    rows = policy.lay_out(batch.params, batch.state, launch, constants)
    predicted = Predicted(torch.zeros_like(rows.tokens), *torch.zeros(2, *rows.tokens.shape))
    for x, values in zip(predicted, (tokens, [confidences], [confidences]), strict=True):
        x[:, :, : len(confidences)] = torch.tensor(values)[:, None]

    def take() -> Progress:
        batch.state, outcome = policy.advance(batch.params, launch, rows, predicted, constants)
        return policy.progress(batch.params, batch.finish, known, launch, batch.state, outcome)

    return predicted, take


def test_a_last_mask_that_becomes_an_eos_ends_a_sequence_without_another_forward_pass() -> None:
    request = {"num_branches": 1, "block_size": 2, "max_new_tokens": 8, "tau_conf": 1.0, "tau_add": 1.0}
    batch = Batch([(request, 5, 0), (request, 5, 0), (request | {"finish_at_eos": False}, 5, 0)], 0, False, 1)
    _, take = step(batch, [0.9, 0.5], [[3, EOS[0]], [3, 4], [3, EOS[0]]])
    progress = take()
    assert progress.done.tolist() == [True, False, False]
    assert progress.tokens[:, :2].tolist() == [[3, EOS[0]], [3, MASK], [3, MASK]]


def test_what_was_not_finite_fails_its_sequence_and_no_other() -> None:
    request = {"num_branches": 2, "block_size": 3, "max_new_tokens": 8, "tau_conf": 1.0}
    batch = Batch([(request, 5, 0), (request, 5, 0)], 0, False, 1)
    step(batch, [0.9, 0.5, 0.4], [[1, 2, 3]] * 2)[1]()
    for seq in batch.sequences:
        seq.seen.append(seq.seen[-1]._replace(opened=1))
    predicted, take = step(batch, [0.9, 0.5, 0.4], [[1, 2, 3]] * 2)
    predicted.max_probs[1, 0, 2], predicted.confidences[1, 0, 2] = float("nan"), policy.NOT_FINITE
    progress = take()
    assert progress.failed.tolist() == [False, True]


def test_what_only_decode_can_do_is_named() -> None:
    assert policy.unsupported(DecodingParams()) is None
    assert policy.unsupported(DecodingParams(branch_score="tail")) == "branch_score 'tail'"
    assert policy.unsupported(DecodingParams(branch_score="window")) == "branch_score 'window'"
    assert policy.unsupported(DecodingParams(creation_weight=0.5)) == "creation_weight 0.5"


def test_what_does_not_fit_into_a_bucket_is_refused() -> None:
    params, _ = policy.empty(Bucket(1, 3, 2, 4, 2), MASK, 1)
    with pytest.raises(ValueError, match="3 num_branches; this bucket has room for 2"):
        policy.admit(params, 0, DecodingParams(num_branches=3), (), 1, 1)
    with pytest.raises(ValueError, match="2 EOS ids; this bucket has room for 1"):
        policy.admit(params, 0, DecodingParams(num_branches=2), EOS, 1, 1)


def kernels(sequences: int) -> Counter[str]:
    """The compute ops of a whole step's policy, traced without values: whoever reads one fails here."""
    bucket = Bucket(sequences, 8, 4, 32, 6)
    params, state = policy.empty(bucket, MASK, 2)
    known = Known(*torch.zeros(7, sequences, dtype=torch.int32))
    launch = policy.launch_for(bucket, known, 4, torch.zeros(sequences, 8, 2, dtype=torch.int32), 0)
    predicted = Predicted(torch.zeros(sequences, 8, 128, dtype=torch.int32), *torch.rand(2, sequences, 8, 128))

    def step(params, state, launch, predicted, constants):
        rows = policy.lay_out(params, state, launch, constants)
        return policy.writes(rows, launch), policy.advance(params, launch, rows, predicted, constants)

    graph = make_fx(step, tracing_mode="fake")(params, state, launch, predicted, tables(bucket)).graph
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    return Counter(str(op) for op in ops if isinstance(op, torch._ops.OpOverload) and not op.is_view)


def test_the_number_of_kernels_is_small_and_does_not_grow_with_the_sequences() -> None:
    found = kernels(1)
    assert found.total() <= 80
    assert found == kernels(5)
    # Not for a compiled step: shapes that depend on values, ties in an order of the kernel's own, AICPU kernels.
    assert not any(
        word in op for op in found for word in ("nonzero", "masked_select", "item", "sort", "scatter", "amin")
    )
