"""Further cases of the self-test: what a decode step computes around the model, in every graph mode or in a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.shards import shard_scores
from lopa_ascend.types import KVShape, Scoring
from scripts.selftest.captures import Step, replayed_case
from scripts.selftest.cases import BLOCK, CAPTURED, DIM, HIDDEN, KV_HEADS, TOKENS, Case, randn

VOCABULARY, MASK = 152064, 151666
"""Of Dream-7B."""
WRITTEN = ((HIDDEN, torch.bfloat16), (256, torch.float32))
"""Width and dtype of the tensors that rows are written to: hidden states, and the states of sequences."""
LAYERS = 28
"""Of Dream-7B."""
LARGE = 2**31
"""Elements of a pool that int32 cannot number."""
SHARE_FOR_POOL = 0.25
"""The most of the free memory that a large pool may take."""


def step_cases(ops: Ops) -> Iterator[Case]:
    """What a step computes around the model in every graph mode."""
    yield copy_case(ops)
    yield score_case(ops)
    yield from large_pool_cases(ops)


def copy_case(ops: Ops) -> Case:
    """The copy of a winner's keys and values from its slot's pages to those of another slot."""
    values = torch.randn(2, 2, 4, PAGE_SIZE, KV_HEADS, DIM).bfloat16()

    def pool_on(device: str) -> KVPool:
        pool = KVPool(KVShape(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM), 4, torch.bfloat16, device)
        pool.caches.copy_(values)
        return pool

    def copied(pool: KVPool) -> Tensor:
        pool.copy([0, 1], [2, 3], PAGE_SIZE - BLOCK, PAGE_SIZE + BLOCK // 2)  # parts of two pages
        return pool.caches

    return Case("copy between pages", partial(copied, pool_on(str(ops.device))), copied(pool_on("cpu")))


def large_pool_cases(ops: Ops) -> Iterator[Case]:
    """The last pages of a pool that is larger than int32 can number, as the engine's are: a write of keys and values in
    the last layer, and a copy in all layers. No case where the pool would take too much of the free memory."""
    shape = KVShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM)
    page_bytes = KVPool.page_bytes(shape, torch.bfloat16)
    num_pages = LARGE // (page_bytes // 2) + 3
    if num_pages * page_bytes > SHARE_FOR_POOL * torch.get_device_module("npu").mem_get_info()[0]:
        return
    values = randn(2, LAYERS, PAGE_SIZE, KV_HEADS, DIM)
    npu_values, slot_mapping = values.to(ops.device), torch.arange(PAGE_SIZE, device=ops.device)

    def run() -> Tensor:
        pool, source = KVPool(shape, num_pages, torch.bfloat16, str(ops.device)), num_pages - 2
        pool.caches[:, :-1, source] = npu_values[:, :-1]
        k, v = npu_values[:, -1]
        ops.kv_write(k, v, pool.k[-1], pool.v[-1], slot_mapping + source * PAGE_SIZE)
        pool.copy([source], [source + 1], 0, PAGE_SIZE)
        return pool.caches[:, :, source + 1]

    yield Case("last pages of a large pool", run, values, timed=False)


def score_case(ops: Ops) -> Case:
    """The predictions of an eager step: the probabilities of the most probable tokens, and the logits of these.

    Their ids are not compared: between equal logits a device may choose another one.
    """
    logits, positions = randn(BLOCK, VOCABULARY), torch.arange(BLOCK)
    scoring = Scoring("max_prob", MASK, VOCABULARY)

    def predicted(logits: Tensor, positions: Tensor) -> list[Tensor]:
        stats = shard_scores(logits, scoring, positions, round_=0)
        ids, probs, _ = merge_scores(stats[None], scoring, positions, round_=0)
        return [probs, logits.gather(1, ids[:, None])]

    run = partial(predicted, logits.to(ops.device), positions.to(ops.device))
    return Case("predictions", run, predicted(logits, positions))


def captured_step_cases(ops: Ops) -> Iterator[Case]:
    """What ends a compiled step, captured with some inputs and replayed with others."""
    name, inputs = f"{CAPTURED} predictions and writes of rows", [_inputs() for _ in range(2)]
    yield replayed_case(ops, name, predictions_and_writes, inputs)


def predictions_and_writes(ops: Ops) -> Step:
    """The predictions and the writes at the end of a compiled step.

    The state of a sequence is int32, and is written as float32 with the same bits, most of which look denormal.
    """
    hidden, states = (torch.zeros(TOKENS + 1, width, dtype=dtype, device=ops.device) for width, dtype in WRITTEN)
    score = GreedyScore(range(VOCABULARY), MASK, VOCABULARY, Group(), ops)

    def step(_: Sequence[int], logits: Tensor, rows: Tensor, values: Tensor, packed: Tensor) -> list[Tensor]:
        scored = score(logits)
        ops.put_rows(hidden, rows, values)
        ops.put_rows(states, rows, packed.view(torch.float32))
        chosen = logits.gather(1, scored.ids.long()[:, None]).view(-1).float()
        return [torch.cat([scored.probs, chosen]), hidden, states.view(torch.int32)]

    return step


def _inputs() -> list[Tensor]:
    """Logits, the rows that are written, hidden states, and states of sequences as int32."""
    return [
        randn(BLOCK, VOCABULARY),
        torch.randperm(TOKENS)[:BLOCK].int(),
        randn(BLOCK, HIDDEN),
        torch.randint(-1, VOCABULARY, (BLOCK, WRITTEN[1][0]), dtype=torch.int32),
    ]
