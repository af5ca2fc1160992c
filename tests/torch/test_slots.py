"""The slots' keys and values, not only tokens: after every step all slots of a sequence hold the same committed KV."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from lopa_ascend import DecodingParams
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.core import Request, Sequence
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PAGE_SIZE, PageTables, pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.runner.batch import slot_mapping
from lopa_ascend.runner.eager import EagerExecutor, Pass
from lopa_ascend.types import RowPlan, RowResult, Scoring, SequencePlan
from tests.dream_checkpoint import load
from tests.tiers import slow_but
from tests.tiny import write_dream


class Run:
    """One sequence, driven step by step."""

    def __init__(self, path, prompt: list[int], params: DecodingParams):
        self.config, weights = load(path)
        self.model = Decoder(dream.FAMILY, self.config, weights, CpuOps())
        mask = self.config.mask_token_id
        self.strategy = begin(SequenceStart(prompt, params, mask, frozenset()))
        slots = self.strategy.max_rows
        num_pages = pages_for(len(prompt) + params.max_new_tokens) * slots
        self.pool = KVPool(self.config.kv_shape(), num_pages, torch.float32, "cpu")
        self.executor = EagerExecutor(self.model, self.pool, self.model.ops)
        self.page_tables = PageTables(self.pool.allocator, slots)
        request = Request("one", tuple(prompt), params)
        scoring = Scoring("max_prob", mask, self.config.vocab_size)
        self.sequence = Sequence(request, self.strategy, scoring, self.page_tables)

    def forward(self, plan: SequencePlan) -> tuple[Pass, list[RowResult]]:
        passes, predictions = self.executor.forward([self.sequence], [self.executor.placement.share(plan)])
        results = self.executor.exchange([plan], predictions)[0]
        assert results is not None
        return passes[0], results

    def make_room(self, plan: SequencePlan) -> None:
        self.sequence.plan = plan
        self.sequence.slot_ends = self.executor.placement.slot_ends(plan)
        self.sequence.make_room()

    def steps(self):
        self.sequence.plan = self.strategy.plan()
        while (plan := self.sequence.plan) is not None:
            self.make_room(plan)
            ((_, record),) = self.executor.run([self.sequence])
            self.page_tables.share_committed(self.strategy.num_committed)
            yield plan, record

    def committed(self, slot: int) -> torch.Tensor:
        """[2, layers, committed, kv_heads, head_dim] of a slot."""
        at = torch.from_numpy(slot_mapping(self.page_tables.by_slot[slot], 0, self.strategy.num_committed))
        return self.pool.caches.flatten(2, 3)[:, :, at]


def settings(attention: str, prompt: int, branches: int = 4) -> tuple[list[int], DecodingParams]:
    params = DecodingParams(
        num_branches=branches, block_size=24, max_new_tokens=160, tau_conf=0.6, tau_add=0.3, window_attention=attention
    )
    return [i % 50 for i in range(prompt)], params


@pytest.mark.parametrize(
    ("prompt", "attention"),
    slow_but(
        itertools.product((5, 127, 128, 150, 260), ("block_causal", "full")),
        [(128, "full"), (150, "block_causal")],
    ),
)
def test_all_slots_hold_the_same_committed_keys_and_values(prompt: int, attention: str, tmp_path) -> None:
    write_dream(tmp_path)
    run = Run(tmp_path, *settings(attention, prompt))
    for _ in run.steps():
        slots = [run.committed(slot) for slot in range(run.strategy.max_rows)]
        assert all(torch.equal(slots[0], other) for other in slots[1:])
        full = run.strategy.num_committed // PAGE_SIZE
        tables = run.page_tables.by_slot
        assert all(table[:full] == tables[0][:full] for table in tables)
        private = [page for table in tables for page in table[full:]]
        assert len(set(private)) == len(private)
    run.page_tables.release()
    assert run.pool.allocator.num_free == run.pool.num_pages


def test_the_committed_values_are_those_of_a_run_without_branches_reading_one_slot(tmp_path) -> None:
    """Block-causal keys and values depend on the tokens alone: a plain prefill of the output gives the same ones."""
    write_dream(tmp_path)
    prompt, params = settings("block_causal", 100)
    run = Run(tmp_path, prompt, params)
    for _ in run.steps():
        pass
    text = [*prompt, *run.strategy.anchor.tokens]
    assert run.strategy.num_committed > len(prompt)
    end = run.strategy.num_committed
    again = Run(tmp_path, prompt, params)
    edges = (100, *range(124, end + 1, 24))
    row = RowPlan(0, tuple(text[:end]), 0, edges, (100,))
    plan = SequencePlan(0, end, (row,), 1, winner_commits=False, prefix_length=100)
    again.make_room(plan)
    again.forward(plan)
    again.strategy.num_committed = end
    torch.testing.assert_close(again.committed(0), run.committed(0), rtol=1e-4, atol=1e-5)


def test_full_attention_commits_the_winners_values(tmp_path) -> None:
    """Without the second phase the slots differ: this is what the copy is for."""
    write_dream(tmp_path)
    run = Run(tmp_path, *settings("full", 100))
    copies = []
    run.pool.copy = lambda *args: copies.append(args)  # type: ignore[method-assign]
    differ = False
    for _ in itertools.islice(run.steps(), 12):
        slots = [run.committed(slot) for slot in range(run.strategy.max_rows)]
        differ |= not all(torch.equal(slots[0], other) for other in slots[1:])
    assert copies
    assert differ


@pytest.mark.parametrize("attention", ["block_causal", "full"])
def test_a_branch_is_bit_equal_whatever_shares_its_batch(attention: str, tmp_path) -> None:
    """The anchor's predictions in a step with four lookahead rows and alone, over the same cache."""
    write_dream(tmp_path, hidden=64, intermediate=96)
    run = Run(tmp_path, *settings(attention, 40))
    compared = 0
    plan = run.strategy.plan()
    while plan is not None:
        run.make_room(plan)
        _, results = run.forward(plan)
        anchor = len(plan.rows) - 1
        _, again = run.forward(replace(plan, rows=(plan.rows[anchor],)))
        assert again[0] == results[anchor]
        compared += len(plan.rows) > 1
        computed, results = run.forward(plan)
        record = run.strategy.absorb(plan, results, 0, 0)
        run.executor.commit(run.sequence, computed, record)
        run.page_tables.share_committed(run.strategy.num_committed)
        plan = run.strategy.plan()
    assert compared > 5


def test_slots_are_the_offsets_in_the_pages_of_the_table() -> None:
    table = (7, 2, 5)
    slots = slot_mapping(table, 100, 300)
    assert slots.dtype == np.int64
    assert slots.tolist() == [table[n // PAGE_SIZE] * PAGE_SIZE + n % PAGE_SIZE for n in range(100, 300)]
    assert slot_mapping(table, 300, 300).tolist() == []
