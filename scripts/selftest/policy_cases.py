"""The decode policy of a compiled step on the device, op by op and in a graph. What it decides must be equal bit by
bit, since the host refuses a step whose decisions differ from those of ``decode/``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.config import DecodingParams
from lopa_ascend.config.decodings import values_of
from lopa_ascend.decode import begin
from lopa_ascend.decode.blocks import Block, Branch
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import (
    HostView,
    empty_params,
    empty_states,
    packed_state,
    write_inputs,
    write_params,
)
from lopa_ascend.graph.policy import Constants, Predicted, advance, branch_rows, pack_state, rows_of_group, unpack_state
from lopa_ascend.graph.tensors import input_size, make_constants, view_inputs
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.types import Fill
from scripts.selftest.captures import Captures
from scripts.selftest.cases import BLOCK, CAPTURED, Case
from scripts.selftest.step_cases import MASK

EOS = 151643
"""Of Dream-7B."""
FILLER = 0
"""What cells without a position hold."""
NUM_GROUPS, OWN_GROUP = 2, 1
"""Branch parallel groups, and the one whose rows are computed."""
BUCKET = Bucket(sequences=4, blocks=4, pages=4, branches=4, slots=2, block_length=BLOCK, max_blocks=4)
NUM_SEQUENCES = BUCKET.sequences - 1
"""The last row is padding."""
PROMPT = 100
"""Positions of each prompt."""
NUM_OPENED = 2
"""Blocks that each sequence has opened."""


def policy_cases(ops: Ops) -> Iterator[Case]:
    """The policy by each rule for the winner, with some inputs op by op, and with others in a replayed graph."""
    constants = make_constants(BUCKET, BUCKET.sequences * BUCKET.slots * BUCKET.pages * PAGE_SIZE)
    npu_constants = Constants(*(x.to(ops.device) for x in constants))
    for branch_acceptance in values_of("branch_acceptance"):
        name = f"{CAPTURED} steps' policy, {branch_acceptance}"
        given, later = random_inputs(), random_inputs()
        npu_given, npu_later = ([x.to(ops.device) for x in inputs] for inputs in (given, later))
        run = partial(decide, npu_given, npu_constants, branch_acceptance)
        expected = decide(given, constants, branch_acceptance)
        yield Case(f"{name}, op by op", run, expected, timed=False, exact=True)
        replay = partial(replayed, npu_given, npu_later, npu_constants, branch_acceptance, name)
        expected = decide(later, constants, branch_acceptance)
        yield Case(f"{name}, replayed", replay, expected, timed=False, exact=True)


def decide(inputs: Sequence[Tensor], constants: Constants, branch_acceptance: str) -> list[Tensor]:
    """What a step computes before and after its forward pass.

    Args:
        inputs: as ``random_inputs`` makes them.
        branch_acceptance: see ``DecodingParams``.
    """
    memory, states, tokens, probs = inputs
    launch, params, _ = view_inputs(memory, BUCKET)
    rows = branch_rows(unpack_state(states, launch, BUCKET.max_cells), launch, params, constants)
    of_group = rows_of_group(rows, launch, constants, NUM_GROUPS, OWN_GROUP, full_attention=True)
    predicted = Predicted(tokens, probs, probs)
    after, winner = advance(rows, predicted, launch, params, constants, branch_acceptance)
    return [*of_group, winner, pack_state(after, BUCKET.max_cells).view(torch.int32)]


def replayed(
    given: Sequence[Tensor], later: Sequence[Tensor], constants: Constants, branch_acceptance: str, name: str
) -> list[Tensor]:
    """``decide`` in a graph that was captured with some inputs, and is replayed with others."""
    memory = [x.clone() for x in given]
    replay = Captures().capture(lambda _: decide(memory, constants, branch_acceptance), name)
    for x, values in zip(memory, later, strict=True):
        x.copy_(values)
    return replay([])


def random_inputs() -> list[Tensor]:
    """The memory of a step's inputs, the packed states of the sequences, and what the model predicts: token ids and
    probabilities [S, B, C], many of which are equal."""
    params = empty_params(2 * BUCKET.sequences, MASK, BUCKET)
    states = empty_states(2 * BUCKET.sequences, BUCKET)
    views = [HostView(BUCKET.sequences + row) for row in range(BUCKET.sequences)]
    for row, seat in enumerate(torch.randperm(BUCKET.sequences)[:NUM_SEQUENCES].tolist()):
        request = random_request()
        write_params(params, seat, request, [EOS])
        states[seat] = packed_state(random_strategy(request), 0, FILLER, BUCKET)
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
    taus = (torch.randint(1, 9, (3,)) / 8).tolist()
    return DecodingParams(
        num_branches=BUCKET.branches - 1,
        block_size=BLOCK,
        max_new_tokens=BUCKET.blocks * BLOCK,
        tau_add=taus[0],
        tau_act=taus[1],
        tau_conf=taus[2],
    )


def random_strategy(request: DecodingParams) -> Strategy:
    """A sequence with half of its positions filled, and a lookahead branch for a mask each."""
    tokens = random_tokens(NUM_OPENED * BLOCK)
    masked = torch.randperm(len(tokens))[: len(tokens) // 2]
    tokens[masked] = MASK
    strategy = begin(SequenceStart([0] * PROMPT, request, MASK, frozenset({EOS}), PROMPT))
    blocks = (strategy.anchor.blocks[0], *(Block(0, 0, 0) for _ in range(NUM_OPENED)))
    anchor = Branch(tuple(tokens.tolist()), blocks, PROMPT)
    guesses = zip(masked.tolist(), random_tokens(request.lookaheads).tolist(), strict=False)
    fills = [Fill(PROMPT + offset, token, 0.0, 0.0) for offset, token in guesses]
    strategy.branches = [*(replace(anchor, own_fills=(fill,)) for fill in fills), anchor]
    return strategy


def random_tokens(*shape: int) -> Tensor:
    """Token ids int32 of two kinds, so that predictions often confirm the lookahead branches."""
    return torch.randint(EOS - 2, EOS, shape, dtype=torch.int32)
