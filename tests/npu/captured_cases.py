"""What a decode step computes, captured as the engine captures it, and replayed with other inputs: a layer up to
attention, the end of a step, and its policy, whose decisions must be equal bit by bit, since the host refuses a step
whose decisions differ from those of ``decode/``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
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
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.score.greedy import GreedyScore
from tests.kernel_cases import BLOCK, EPS, Case
from tests.npu.captures import Step, capture_lengths, replayed_case
from tests.npu.cases import CAPTURED, CPU, EOS, MASK, S, paged_entries, randn

NUM_BLOCKS = S.tokens // BLOCK
"""Attention entries of a step, before they are divided."""
OTHER_LENGTHS = [513, 521, 529, 537]
LONG_LENGTHS = [545, 1100, 2050, 4500]
"""Beyond 1,024 keys, from which on a kernel may split them among cores, and beyond 4,096."""
ROPE_THETA = 1e6
WRITTEN = ((S.hidden, torch.bfloat16), (256, torch.float32))
"""Width and dtype of the tensors that rows are written to: hidden states, and the states of sequences."""


def captured_cases(ops: Ops) -> Iterator[Case]:
    """All that only graph modes need on one rank."""
    yield from layer_cases(ops)
    name = f"{CAPTURED} predictions and writes of rows"
    yield replayed_case(ops, name, predictions_and_writes, [random_writes() for _ in range(2)])
    yield from policy_cases(ops)


# ---- a layer -------------------------------------------------------------------------------------------------------


class Layer:
    """The part of a decoder layer up to attention. ``weights``: of the norm, and of the product for q, k and v with its
    bias, as ``layer_weights`` makes them."""

    def __init__(self, ops: Ops, weights: Sequence[Tensor]) -> None:
        self._ops = ops
        self._norm, qkv, self._bias = (x.to(ops.device) for x in weights)
        self._qkv = ops.stored(qkv)
        angles = torch.outer(torch.arange(S.tokens) * 17.0, ROPE_THETA ** -(torch.arange(0, S.dim, 2) / S.dim))
        cos, sin = ops.rope_tables(angles.cos().to(ops.device), angles.sin().to(ops.device), torch.bfloat16)
        # For each head of q, k and v, as Dream has them: v is not rotated.
        is_rotated = (torch.arange(S.heads + 2 * S.kv_heads) < S.heads + S.kv_heads)[:, None].to(ops.device)
        self._tables = torch.where(is_rotated, cos, 1.0), torch.where(is_rotated, sin, 0.0)

    def __call__(self, kv_lengths: Sequence[int], inputs: Sequence[Tensor], caches: Tensor, entries: Entries) -> Tensor:
        """Attention of what ``layer_inputs`` gives, with these KV lengths in place of the entries'."""
        x, slot_mapping, page_tables = inputs
        entries = replace(entries, kv_lengths=tuple(kv_lengths), page_tables=page_tables)
        qkv = self._ops.linear(self._ops.rms_norm(x, self._norm, EPS), self._qkv, self._bias)
        rotated = self._ops.rope(qkv.view(S.tokens, -1, S.dim), *self._tables)
        q, k, v = rotated.split([S.heads, S.kv_heads, S.kv_heads], 1)
        self._ops.kv_write(k, v, caches[0], caches[1], slot_mapping)
        return self._ops.attention(q, caches[0], caches[1], entries)


def layer_weights() -> list[Tensor]:
    """Of the norm [hidden], and of the product for q, k and v [rows, hidden] with its bias [rows]."""
    rows = (S.heads + 2 * S.kv_heads) * S.dim
    return [randn(S.hidden), randn(rows, S.hidden, scale=S.hidden**-0.5), randn(rows)]


def layer_inputs(
    kv_lengths: Sequence[int] | None, width: int, num_pages: int, max_queries: int | None
) -> tuple[Entries, list[Tensor]]:
    """Attention entries with page tables of ``width`` pages, and what a layer reads: hidden states [tokens, hidden],
    the cache position of each token, and the page tables. Without KV lengths of the blocks, those of a capture."""
    entries, _ = paged_entries([BLOCK] * NUM_BLOCKS, kv_lengths or [1] * NUM_BLOCKS, num_pages, width)
    entries = entries.divided(max_queries)
    if kv_lengths is None:
        entries = replace(entries, kv_lengths=tuple(capture_lengths(len(entries.lengths))))
    slot_mapping = torch.randperm(num_pages * PAGE_SIZE)[: S.tokens]
    return entries, [randn(S.tokens, S.hidden), slot_mapping, entries.page_tables]


def layer_cases(ops: Ops) -> Iterator[Case]:
    """Layers that are replayed twice. Lengths that stay as they were are not given to the kernel again: it must have
    kept them, whether it got them in the capture or since then."""
    name = f"{CAPTURED} layer, replayed with"
    yield layer_case(ops, f"{name} other KV lengths", [OTHER_LENGTHS] * 2)
    yield layer_case(ops, f"{name} KV lengths that a thread changes", [OTHER_LENGTHS] * 2, in_thread=True)
    yield layer_case(ops, f"{name} the KV lengths of the capture", [None] * 2)
    yield layer_case(ops, f"{name} up to {max(LONG_LENGTHS)} keys", [LONG_LENGTHS] * 2)
    partly_changed = [*OTHER_LENGTHS[:2], *(length + BLOCK for length in OTHER_LENGTHS[2:])]
    yield layer_case(ops, f"{CAPTURED} layer of two attention kernels", [OTHER_LENGTHS, partly_changed], 2)


def layer_case(
    ops: Ops, name: str, replays: Sequence[list[int] | None], num_kernels: int = 1, in_thread: bool = False
) -> Case:
    """A layer that is captured and replayed as the engine does it, with its cache.

    Args:
        replays: the KV lengths of each block in each replay; None for those of the capture.
        num_kernels: launches of the attention kernel. The cache has no more pages than these need.
    """
    width = 1 + max(pages_for(max(kv_lengths or [1])) for kv_lengths in replays)  # wider than needed, as the engine's
    num_entries = len(layer_inputs(None, 1, 1, ops.max_queries)[0].lengths)
    num_pages = width * num_entries // num_kernels
    weights, filled = layer_weights(), randn(2, num_pages, PAGE_SIZE, S.kv_heads, S.dim)
    given = [layer_inputs(kv_lengths, width, num_pages, ops.max_queries) for kv_lengths in (None, *replays)]
    entries = given[0][0]

    def layer_with_cache(there: Ops) -> Step:
        layer, caches = Layer(there, weights), filled.to(there.device, copy=True)
        return lambda kv_lengths, *tensors: [layer(kv_lengths, tensors, caches, entries), caches]

    inputs, lengths = [tensors for _, tensors in given], [of_each.kv_lengths for of_each, _ in given]
    return replayed_case(ops, name, layer_with_cache, inputs, lengths, in_thread=in_thread)


# ---- the end of a step ---------------------------------------------------------------------------------------------


def predictions_and_writes(ops: Ops) -> Step:
    """The predictions and the writes at the end of a compiled step, from what ``random_writes`` makes.

    The state of a sequence is int32, and is written as float32 with the same bits, most of which look denormal.
    """
    hidden, states = (torch.zeros(S.tokens + 1, width, dtype=dtype, device=ops.device) for width, dtype in WRITTEN)
    score = GreedyScore(range(S.vocabulary), MASK, S.vocabulary, ALONE, ops)

    def step(_: Sequence[int], logits: Tensor, rows: Tensor, values: Tensor, packed: Tensor) -> list[Tensor]:
        scored = score(logits)
        ops.put_rows(hidden, rows, values)
        ops.put_rows(states, rows, packed.view(torch.float32))
        return [scored.probs, logits_of(logits, scored.ids), hidden, states.view(torch.int32)]

    return step


def logits_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The logits of chosen ids. The ids are not compared: between equal logits a device may choose another one."""
    return logits.gather(1, ids.long()[:, None]).view(-1).float()


def random_writes() -> list[Tensor]:
    """Logits, the rows that are written, hidden states, and states of sequences as int32."""
    return [
        randn(BLOCK, S.vocabulary),
        torch.randperm(S.tokens)[:BLOCK].int(),
        randn(BLOCK, S.hidden),
        torch.randint(-1, S.vocabulary, (BLOCK, WRITTEN[1][0]), dtype=torch.int32),
    ]


# ---- the policy ----------------------------------------------------------------------------------------------------

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
        yield Case(f"{name}, op by op", run, partial(make(CPU), (), *inputs[0]), most=0.0, timed=False)
        yield replace(replayed_case(ops, f"{name}, replayed", make, inputs), most=0.0)


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
