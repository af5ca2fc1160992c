"""The decode policy of a compiled step on the device, op by op and in a graph. What it decides must be equal bit by
bit, since the host refuses a step whose decisions differ from those of ``decode/``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import DecodingParams
from lopa_ascend.config.decodings import values_of
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import HostView, empty_params, empty_states, write_inputs, write_params
from lopa_ascend.graph.policy import (
    Constants,
    Predicted,
    State,
    advance,
    branch_rows,
    pack_state,
    rows_of_group,
    unpack_state,
)
from lopa_ascend.graph.tensors import input_size, make_constants, view_inputs
from lopa_ascend.kv.pages import PAGE_SIZE
from scripts.selftest.captures import Step, replayed_case
from scripts.selftest.cases import BLOCK, CAPTURED, CPU, Case
from scripts.selftest.step_cases import MASK

EOS = 151643
"""Of Dream-7B."""
NUM_GROUPS, OWN_GROUP = 2, 1
"""Branch parallel groups, and the one whose rows are computed."""
BUCKET = Bucket(sequences=4, blocks=4, pages=4, branches=4, slots=2, block_length=BLOCK, max_blocks=4)
NUM_SEQUENCES = BUCKET.sequences - 1
"""The last row is padding."""
NUM_LOOKAHEADS = BUCKET.branches - 1
PROMPT = 100
"""Positions of each prompt."""
NUM_OPENED = 2
"""Blocks that each sequence has opened."""


def policy_cases(ops: Ops) -> Iterator[Case]:
    """The policy by each rule for the winner, with some inputs op by op, and with others in a replayed graph."""
    constants = make_constants(BUCKET, BUCKET.sequences * BUCKET.slots * BUCKET.pages * PAGE_SIZE)
    for branch_acceptance in values_of("branch_acceptance"):
        name, inputs = f"{CAPTURED} steps' policy, {branch_acceptance}", [random_inputs() for _ in range(2)]
        make = partial(policy, constants, branch_acceptance)
        run = partial(make(ops), (), *(x.to(ops.device) for x in inputs[0]))
        yield Case(f"{name}, op by op", run, make(CPU)((), *inputs[0]), timed=False, exact=True)
        yield replayed_case(ops, f"{name}, replayed", make, inputs, exact=True)


def policy(constants: Constants, branch_acceptance: str, ops: Ops) -> Step:
    """What a step computes before and after its forward pass, from what ``random_inputs`` makes."""
    own = Constants(*(x.to(ops.device) for x in constants))

    def decide(_: Sequence[int], memory: Tensor, states: Tensor, tokens: Tensor, probs: Tensor) -> list[Tensor]:
        launch, params = view_inputs(memory, BUCKET)[:2]
        rows = branch_rows(unpack_state(states, launch, BUCKET.max_cells), launch, params, own)
        of_group = rows_of_group(rows, launch, own, NUM_GROUPS, OWN_GROUP, full_attention=True)
        after, winner = advance(rows, Predicted(tokens, probs, probs), launch, params, own, branch_acceptance)
        return [*of_group, winner, pack_state(after, BUCKET.max_cells).view(torch.int32)]

    return decide


def random_inputs() -> list[Tensor]:
    """The memory of a step's inputs, the packed states of the sequences, and what the model predicts: token ids and
    probabilities [S, B, C], many of which are equal."""
    params = empty_params(2 * BUCKET.sequences, MASK, BUCKET)
    states = empty_states(2 * BUCKET.sequences, BUCKET)
    seats = torch.randperm(BUCKET.sequences)[:NUM_SEQUENCES]
    states[seats] = pack_state(random_states(), BUCKET.max_cells)
    views = [HostView(BUCKET.sequences + row) for row in range(BUCKET.sequences)]
    for row, seat in enumerate(seats.tolist()):
        request = random_request()
        write_params(params, seat, request, [EOS])
        blocks = request.max_new_tokens // BLOCK
        views[row] = HostView(seat, PROMPT, BLOCK, request.max_new_tokens, 0, 0, BUCKET.blocks, blocks)
    memory = torch.zeros(input_size(BUCKET), dtype=torch.int32)
    shape = BUCKET.shape("sequences slots pages")
    pages = torch.randperm(math.prod(shape)).view(shape).int()
    write_inputs(view_inputs(memory, BUCKET), BUCKET, views, pages, params, math.prod(shape) * PAGE_SIZE)
    cells = BUCKET.shape("sequences branches cells")
    return [memory, states, random_tokens(*cells), torch.randint(1, 65, cells) / 64]


def random_request() -> DecodingParams:
    """Parameters of a request for the window of ``BUCKET``."""
    taus = dict(zip(("tau_add", "tau_act", "tau_conf"), (torch.randint(1, 9, (3,)) / 8).tolist(), strict=True))
    return DecodingParams(num_branches=NUM_LOOKAHEADS, block_size=BLOCK, max_new_tokens=BUCKET.blocks * BLOCK, **taus)


def random_states() -> State:
    """Sequences with half of their opened positions filled, and with a lookahead branch for a mask each."""
    opened = NUM_OPENED * BLOCK
    masked = torch.stack([torch.randperm(opened)[: opened // 2] for _ in range(NUM_SEQUENCES)])
    filled = masked[:, :NUM_LOOKAHEADS]
    tokens = torch.full((NUM_SEQUENCES, BUCKET.max_cells), MASK, dtype=torch.int32)
    tokens[:, :opened] = random_tokens(NUM_SEQUENCES, opened).scatter(1, masked, MASK)
    guesses = torch.zeros_like(tokens).scatter(1, filled, random_tokens(*filled.shape))
    cells = torch.full((NUM_SEQUENCES, BUCKET.branches), -1, dtype=torch.int32)
    cells[:, :NUM_LOOKAHEADS] = filled
    return State(tokens, guesses, torch.full_like(cells, NUM_OPENED), cells)


def random_tokens(*shape: int) -> Tensor:
    """Token ids int32 of two kinds, so that predictions often confirm the lookahead branches."""
    return torch.randint(EOS - 2, EOS, shape, dtype=torch.int32)
