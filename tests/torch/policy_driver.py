"""Drives ``decode/`` and the policy as tensor functions side by side with random predictions, and compares them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.blocks import BlockState
from lopa_ascend.decode.branch_scores import SCALE
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.graph import inputs, policy, tensors
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import HostView
from lopa_ascend.graph.policy import Launch, Predicted, RequestParams, Rows, State
from lopa_ascend.graph.tensors import ModelInputs
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables, pages_for
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.runner.batch import build_batch
from lopa_ascend.types import DREAM, ModelProperties, RowResult, SequencePlan, StepRecord

MASK, EOS, VOCAB, FILLER = 20, (7, 9), 40, 41
TOKENS = tuple(token for token in range(VOCAB) if token != MASK)
LENGTH, CAPACITY = 6, 26  # the longest block, and as many blocks as a window can have here
SEATS = 5
constants_of = cache(tensors.make_constants)

GRIDS: tuple[Callable[[random.Random], float], ...] = (
    lambda rng: rng.choice([0.25, 0.5, 0.75]),  # ties everywhere
    lambda rng: rng.choice([0.1, 0.25, 0.5, 0.75, 0.95, 1.0]),  # on the thresholds
    lambda rng: (rng.randrange(8) + 0.5) / SCALE,
    lambda rng: rng.choice([-12.0, -0.5, -0.0, 0.0]),
    lambda rng: rng.random(),
    lambda rng: -12 * rng.random(),
)


def answer(rng: random.Random, length: int) -> RowResult:
    """Random predictions of so many positions; one token in twenty is an EOS, or one in three."""
    often = rng.choice([0.05, 0.05, 0.3])
    tokens = [rng.choice(EOS if rng.random() < often else TOKENS) for _ in range(length)]
    probs, confs = (np.array([grid(rng) for _ in tokens], np.float32).tolist() for grid in rng.choices(GRIDS, k=2))
    return RowResult(tuple(tokens), tuple(probs), tuple(confs))


class Seen(NamedTuple):
    """Blocks of a sequence before a step, as the host sees them: of the branch that has opened most; ``caps`` as
    ``HostView.max_opened_blocks``."""

    settled: int
    opened: int
    caps: int


class Given(NamedTuple):
    """What the host writes for a step."""

    launch: Launch
    params: RequestParams
    model: ModelInputs


class Sequence:
    """One sequence: its strategy, and what the host keeps of it."""

    def __init__(self, rng: random.Random, properties: ModelProperties, request: dict, prompt: int, steps: int):
        decoding = "lopa" if request["num_branches"] else "d2f"
        self.params = DecodingParams(decoding=decoding, **request)
        self.usual = answer(rng, CAPACITY * LENGTH).tokens
        """By cell, what many steps predict, so that one confirms what another has guessed."""
        self.size = self.params.block_size
        text = rng.choices(TOKENS, k=prompt)
        num_committed = 0 if steps else properties.origin(prompt, self.size)
        self.strategy: Strategy = begin(
            SequenceStart(text, self.params, MASK, frozenset(EOS), num_committed, properties)
        )
        self.origin, self.length = self.strategy.origin, self.strategy.limit - self.strategy.origin
        for _ in range(steps):
            plan = self.strategy.plan()
            if plan is None:
                break
            self.strategy.absorb(plan, [answer(rng, len(row.masked)) for row in plan.rows], 0, 0)
        now = self.look()
        committed = sum(block.state is BlockState.IN_CACHE for block in self.blocks)
        self.seen = [Seen(committed, now.opened, now.caps), now]
        self.first = [committed]

    @property
    def blocks(self):
        """The anchor's generated blocks."""
        return self.strategy.branches[-1].blocks[1:]

    def look(self) -> Seen:
        anchor, opened = self.strategy.anchor, len(self.blocks)
        most_opened = max(len(branch.blocks) - 1 for branch in self.strategy.branches)
        settled = sum(block.state is not BlockState.ACTIVE for block in self.blocks)
        return Seen(settled, most_opened, opened if anchor.eos else -(-self.length // self.size))

    def cell(self, position: int) -> int:
        at = position - self.origin
        return at // self.size * LENGTH + at % self.size

    def position(self, cell: int) -> int:
        block, offset = divmod(cell, LENGTH)
        return self.origin + block * self.size + offset

    def cells(self, blocks: range) -> list[int]:
        """Those that hold a position."""
        inside = [(block * LENGTH + i, block * self.size + i) for block in blocks for i in range(self.size)]
        return [cell for cell, at in inside if at < self.length]

    def write_params(self, params: RequestParams, seat: int) -> None:
        num_given = len(self.strategy.prompt) - self.origin
        inputs.write_params(params, seat, self.params, sorted(self.strategy.ends), num_given)

    def packed(self, shape: Bucket) -> torch.Tensor:
        """Takes the sequence over from its strategy."""
        return inputs.packed_state(self.strategy, self.first[0], FILLER, shape)


class Batch:
    """Sequences under both policies, each in a seat of its own. ``late``: a step is launched on what was known before
    the last one. ``size`` branch-parallel groups."""

    def __init__(
        self,
        specs: list[tuple[dict, int, int]],
        seed: int,
        late: bool,
        size: int,
        branch_acceptance: str = "published",
        properties: ModelProperties = DREAM,
    ):
        self.rng, self.late, self.size = random.Random(seed), late, size
        self.branch_acceptance = branch_acceptance
        kind = {"branch_acceptance": branch_acceptance}
        self.sequences = [Sequence(self.rng, properties, request | kind, *others) for request, *others in specs]
        slots = -(-max(1 + seq.params.lookaheads for seq in self.sequences) // size)
        self.bucket = Bucket(len(specs), CAPACITY, 1, slots * size, slots, LENGTH, CAPACITY)
        self.bucket = self.bucket._replace(logit_shift=properties.logit_shift)
        self.seats = self.rng.sample(range(SEATS), len(specs))
        self.params = inputs.empty_params(SEATS + len(specs), MASK, self.bucket)
        self.storage = inputs.empty_states(SEATS + len(specs), self.bucket)
        self.storage[:SEATS].view(torch.int32).random_(VOCAB)
        for seat, seq in zip(self.seats, self.sequences, strict=True):
            seq.write_params(self.params, seat)
            self.storage[seat] = seq.packed(self.bucket)
        self.plans = [seq.strategy.plan() for seq in self.sequences]
        self.held = CAPACITY
        self.present = {row for row, plan in enumerate(self.plans) if plan is not None}

    def launch(self) -> tuple[list[HostView], torch.Tensor, Given]:
        """The next launch, with random page tables and a window of some blocks too many."""
        views = [HostView(SEATS + row) for row in range(len(self.seats))]
        blocks = -(-self.bucket.branches // LENGTH)
        for row in self.present:
            seq = self.sequences[row]
            first, seen = seq.seen[-2].settled, seq.seen[-2 if self.late else -1]
            blocks = max(blocks, min(seen.opened + self.late, seen.caps) - first)
            length, limit = seq.origin, seq.length
            # What a step commits may be shared before it is written: all branches write the same.
            final = length + min((first if self.late else seq.seen[-1].settled) * seq.size, limit)
            shared = self.rng.randint(0, final // PAGE_SIZE)
            seat, before = self.seats[row], seq.first[-1]
            views[row] = HostView(seat, length, seq.size, limit, first, before, self.held, seen.caps, shared, FILLER)
            seq.first.append(first)
        slots = self.bucket.slots
        most = max(1, *(pages_for(view.origin + view.num_positions) for view in views))
        blocks = min(blocks + self.rng.choice([0, 0, 1, 3]), CAPACITY)
        self.bucket = self.bucket._replace(blocks=blocks, pages=most)
        pages = torch.tensor(self.rng.sample(range(len(views) * slots * most), len(views) * slots * most))
        pages = pages.view(len(views), slots, most).to(torch.int32)
        for row, view in enumerate(views):
            pages[row, 1:, : view.num_shared_pages] = pages[row, :1, : view.num_shared_pages]
            pages[row, -(-(1 + self.sequences[row].params.lookaheads) // self.size) :] = -1
        self.first_padding_position = pages.numel() * PAGE_SIZE
        memory = torch.empty(tensors.input_size(self.bucket), dtype=torch.int32)
        given = Given(*tensors.view_inputs(memory, self.bucket))
        self.block_ends = inputs.write_inputs(
            given, self.bucket, views, pages, self.params, self.first_padding_position
        )
        return views, pages, given

    def predict(self, rows: Rows) -> tuple[Predicted, list[list[RowResult]]]:
        """What a model may say, nonsense outside the masked cells. Half of the time branches agree where they can."""
        shape, noise = rows.tokens.shape, torch.Generator().manual_seed(self.rng.randrange(2**31))
        tokens = torch.randint(0, VOCAB, shape, dtype=torch.int32, generator=noise)
        probs = torch.rand(shape, generator=noise)
        is_probability = self.rng.random() < 0.5
        confs = probs if is_probability else torch.full(shape, self.rng.choice([float("nan"), -100.0, 100.0]))
        results: list[list[RowResult]] = [[] for _ in self.sequences]
        for row in range(shape[0]):
            common = answer(self.rng, shape[2]) if self.rng.random() < 0.5 else None
            usual = self.sequences[row].usual[self.sequences[row].first[-1] * LENGTH :]
            is_usual = self.rng.random() < 0.5
            for branch in range(shape[1]):
                at = rows.masked[row, branch].nonzero()[:, 0]
                columns = astuple(common or answer(self.rng, len(at)))[:3]
                if is_probability:
                    columns = columns[0], *[tuple(min(abs(prob), 1.0) for prob in columns[1])] * 2
                if common is not None:
                    columns = tuple(tuple(column[i] for i in at) for column in columns)
                if is_usual:
                    columns = tuple(usual[i] if i < len(usual) else 0 for i in at), *columns[1:]
                for x, column in zip((tokens, probs, confs), columns, strict=True):
                    x[row, branch, at] = torch.tensor(column, dtype=x.dtype)
                results[row].append(RowResult(*columns))
        return Predicted(tokens, probs, confs), results

    def run(self) -> Iterator[tuple[int, StepRecord]]:
        """Steps until everything is done; yields (sequence, record)."""
        done: set[int] = set()
        while self.present:
            views, pages, given = self.launch()
            launch, params = given.launch, given.params
            constants = constants_of(self.bucket, self.first_padding_position)
            state = policy.unpack_state(self.storage, launch, self.bucket.max_cells)
            rows = policy.branch_rows(state, launch, params, constants)
            for row in self.present - done:
                self.compare_rows(row, given, rows)
            self.compare_writes(views, pages, given, rows, self.present - done)
            predicted, results = self.predict(rows)
            after, winner = policy.advance(rows, predicted, launch, params, constants, self.branch_acceptance)
            self.storage[launch.seats] = policy.pack_state(after, self.bucket.max_cells)
            self.held = self.bucket.blocks
            gone = set(done)
            for row in self.present - gone:
                plan, strategy = self.plans[row], self.sequences[row].strategy
                assert plan is not None
                record = strategy.absorb(plan, results[row][: len(plan.rows)], 0, 0)
                assert int(winner[row]) == record.winner
                self.sequences[row].seen.append(self.sequences[row].look())
                self.compare_state(row, given, after)
                self.plans[row] = strategy.plan()
                done |= {row} if self.plans[row] is None else set()
                yield row, record
            self.present -= gone if self.late else done  # launched late, a finished sequence is computed once more

    def hidden_row(self, row: int, block: int) -> int:
        """Where the hidden state before a block is kept."""
        return self.seats[row] * (1 + CAPACITY) + block % (1 + CAPACITY)

    def compare_rows(self, row: int, given: Given, rows: Rows) -> None:
        seq, plan, (S, _, _, _, R, *_) = self.sequences[row], self.plans[row], self.bucket
        assert plan is not None
        cells, first = given.launch.cells[row].tolist(), seq.first[-1]
        assert rows.is_lookahead[row].tolist() == [b < len(plan.rows) - 1 for b in range(self.bucket.branches)]
        assert rows.is_anchor[row].nonzero().flatten().tolist() == [len(plan.rows) - 1]
        numbers = given.model.positions.view(S, R, -1)[row, 0]
        hidden_rows = given.model.hidden_rows.view(S, R, -1)[row]
        assert len(set(given.model.hidden_rows.tolist())) == len(given.model.hidden_rows)
        for b, expected in enumerate(plan.rows):
            assert expected.start == seq.position(first * LENGTH)
            opened = int(rows.num_opened_blocks[row, b])
            inside = [cells.index(cell) for cell in seq.cells(range(first, opened))]
            positions = numbers[inside].tolist()
            assert positions == list(range(expected.start, expected.end))
            assert rows.tokens[row, b, inside].tolist() == list(expected.tokens)
            masked = rows.masked[row, b].nonzero()[:, 0]
            assert numbers[masked].tolist() == list(expected.masked)
            slot = b // self.size
            source = given.model.predicted_by.view(S, R, -1)[row, slot, inside].tolist()
            seen = dict(zip(hidden_rows[slot].tolist(), numbers.tolist(), strict=True))
            if shift := self.bucket.logit_shift:
                assert source[0] == self.hidden_row(row, first) not in given.model.hidden_rows
            assert [seen[i] for i in source[shift:]] == [p - shift for p in positions[shift:]]
            assert tuple(self.block_ends[row, : opened - first].tolist()) == expected.entry_ends
            masks_before = torch.cat([torch.zeros(1), rows.masks[row, b, :-1]])
            activated = masks_before <= given.params.masks_to_activate[row]
            blocks = seq.strategy.branches[b].blocks[1 + first :]
            assert activated[: len(blocks)].tolist() == [block.activated for block in blocks]

    def compare_writes(
        self, views: list[HostView], pages: torch.Tensor, given: Given, rows: Rows, present: set[int]
    ) -> None:
        positions = given.model.positions.view(self.bucket.sequences, self.bucket.slots, -1)
        for group in range(self.size):
            constants = constants_of(self.bucket, self.first_padding_position)
            of_group = partial(policy.rows_of_group, rows, given.launch, constants, self.size, group)
            tokens, at = of_group(full_attention=False)
            block = given.launch.cells // LENGTH
            is_open = block[:, None] < rows.num_opened_blocks[:, group :: self.size, None]
            at_in_full_attention = torch.where(is_open, at, constants.padding_positions)
            assert torch.equal(of_group(full_attention=True)[1], at_in_full_attention)
            assert len(set(at.flatten().tolist())) == at.numel()
            assert int(at.max()) < self.first_padding_position + at.numel()
            for row in present:
                plan = self.plans[row]
                assert plan is not None
                ends = [branch.end for branch in plan.rows[group :: self.size]]
                found = {}
                for slot in range(at.shape[1]):
                    columns = at[row, slot], positions[row, slot], tokens[row, slot]
                    for where, position, token in zip(*(column.tolist() for column in columns), strict=True):
                        page = position // PAGE_SIZE
                        if where >= self.first_padding_position:
                            continue
                        if slot < len(ends) and position >= ends[slot]:  # not open yet: nobody reads it
                            assert where == int(pages[row, slot, page]) * PAGE_SIZE + position % PAGE_SIZE
                            assert page >= views[row].num_shared_pages
                        else:
                            found[where] = position, token
                expected = expected_writes(plan, pages[row], views[row].num_shared_pages, self.size, group)
                num_rows = len(plan.rows[group :: self.size])
                of_branches, of_others = (set(part.flatten().tolist()) for part in pages[row].split_with_sizes(
                    [num_rows, self.bucket.slots - num_rows]
                ))  # fmt: skip
                # Slots without a branch hold a copy of the anchor, in pages of their own.
                others = [where for where in found if where not in expected]
                assert all(where // PAGE_SIZE in of_others - of_branches for where in others)
                assert {where: found[where] for where in found if where not in others} == expected

    def compare_state(self, row: int, given: Given, state: State) -> None:
        seq = self.sequences[row]
        branches = seq.strategy.branches
        cells = given.launch.cells[row].tolist()
        for b in range(self.bucket.branches):
            fill = branches[b].lookahead if b < len(branches) else None
            num_opened = len(branches[min(b, len(branches) - 1)].blocks) - 1
            assert int(state.num_opened_blocks[row, b]) == num_opened
            assert int(state.lookahead_cells[row, b]) == (-1 if fill is None else seq.cell(fill.position))
            assert fill is None or int(state.guesses[row, cells.index(seq.cell(fill.position))]) == fill.token
        for i, token in enumerate(branches[-1].tokens, len(seq.strategy.prompt)):
            if seq.cell(i) > cells[-1]:
                assert token == MASK, "a block that the step has opened"
            elif seq.cell(i) >= cells[0]:
                assert int(state.tokens[row, cells.index(seq.cell(i))]) == token


def expected_writes(plan: SequencePlan, pages: torch.Tensor, shared: int, size: int, group: int) -> dict:
    """{cache position: (position, token)} as the eager step writes them."""
    share = Placement(size, group).share(plan)
    if not share.rows:
        return {}
    tables = PageTables(PageAllocator(0), 0)
    tables.by_slot, tables.num_shared_pages = pages.tolist(), shared
    batch = build_batch([(share, tables)], None, 0).inputs
    assert batch is not None
    positions, tokens = batch.positions[batch.source], batch.tokens[batch.source]
    return dict(zip(batch.slot_mapping.tolist(), zip(positions.tolist(), tokens.tolist(), strict=True), strict=True))
