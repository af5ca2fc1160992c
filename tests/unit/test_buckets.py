"""Buckets: few, in the order of their cost, and the cheapest that holds a step is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.config import EngineConfig, GraphParams, ParameterError
from lopa_ascend.graph.buckets import Bucket, Buckets, declare
from lopa_ascend.graph.setup import plan_graphs
from lopa_ascend.kv.pages import pages_for, slots_for
from lopa_ascend.types import DREAM


def buckets(
    sequences: int = 8, blocks: int = 8, pages: int = 300, branches: int = 4, max_tokens: int = 10**9
) -> Buckets:
    return declare(Bucket(sequences, blocks, pages, branches, branches, 32, blocks), max_tokens)


def test_an_engine_has_few_and_the_largest_holds_all_it_can_be_asked_for() -> None:
    declared = buckets().declared
    assert len(declared) == len(set(declared)) == 3 * 3
    assert {(b.sequences, b.blocks) for b in declared} == set(itertools.product((1, 4, 8), (2, 4, 8)))
    assert {b.pages for b in declared} == {300}
    assert max(declared) == declared[-1] == Bucket(8, 8, 300, 4, 4, 32, 8)
    assert len({b.name for b in declared}) == len(declared)


@pytest.mark.parametrize("max_model_len", [2048, 8192, 131072])
def test_an_engine_of_16_ranks_has_at_most_fifteen_by_default(max_model_len: int) -> None:
    """Of tensor parallel size 4 and branch parallel size 4, and with the default limits."""
    config = EngineConfig(tensor_parallel_size=4, branch_parallel_size=4)
    slots = slots_for(1 + config.graph_params.num_branches, config.branch_parallel_size)
    blocks, pages = config.graph_window_blocks, pages_for(max_model_len)
    shape = Bucket(config.max_num_seqs, blocks, pages, 4 * slots, slots, config.graph_params.block_size, blocks)
    declared = declare(shape, max(4096, max_model_len)).declared
    assert len(declared) <= 15
    assert sorted({bucket.sequences for bucket in declared}) == [1, 4, 8, 16, 32]
    assert all(bucket.pages == pages for bucket in declared)


@pytest.mark.parametrize(
    ("settings", "max_model_len"),
    [
        ({"graph_params": GraphParams(num_branches=15, block_size=4), "graph_window_blocks": 2}, 2048),
        ({"graph_params": GraphParams(num_branches=3, block_size=1)}, 3),
    ],
)
def test_windows_with_fewer_positions_than_branches_are_refused(settings: dict[str, Any], max_model_len: int) -> None:
    """Each branch takes a position of its own in the window."""
    config = EngineConfig(graph_mode="inductor", **settings)
    with pytest.raises(ParameterError, match="graph_window_blocks.*fewer positions than the"):
        plan_graphs(config, "any model", DREAM, max_model_len, 4096)


@pytest.mark.parametrize(("hidden_size", "tp"), [(3584, 4), (3584, 2), (2048, 4), (2048, 2)])
def test_of_what_the_vector_cores_sum_at_a_time_a_bucket_uses_more_than_half(hidden_size: int, tp: int) -> None:
    limit = tp * 2**20 // (2 * hidden_size)
    declared = declare(Bucket(32, 8, 64, 4, 1, 32, 8), 8192).declared
    assert limit / 2 < max(bucket.tokens for bucket in declared if bucket.tokens <= limit)
    eight = Buckets(declared).choose(5, 2, 64)
    assert eight is not None
    assert eight.tokens == 512


def test_windows_that_are_smaller_than_asked_for_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    wide = GraphParams(num_branches=15, block_size=64)
    config = EngineConfig(graph_mode="inductor", graph_params=wide, graph_window_blocks=8)
    with caplog.at_level("INFO", logger="lopa_ascend.graph.setup"):
        plan_graphs(config, "any model", DREAM, 4096, 10**6)
        assert not caplog.records
        plan_graphs(config, "any model", DREAM, 4096, 4096)
    assert "windows of at most 4 blocks, and not of 8" in caplog.text


def test_packed_buckets_stand_beside_full_ones_and_are_chosen_where_they_hold_the_block_rows() -> None:
    full = Bucket(4, 4, 300, 4, 4, 32, 4)
    declared = declare(full, 10**9, packs=True)
    alone = [(b.blocks, b.rows, b.tokens) for b in declared.declared if b.sequences == 1]
    assert alone == [(2, 4, 128), (2, 6, 192), (2, None, 256), (4, 12, 384), (4, None, 512)]
    assert {b for b in declared.declared if b.rows is None} == set(declare(full, 10**9).declared)
    for rows, expected in ((1, 4), (4, 4), (5, 6), (7, None), (8, None), (None, None)):
        chosen = declared.choose(1, 2, 300, rows)
        assert chosen is not None
        assert (chosen.blocks, chosen.rows) == (2, expected)
    wide = declared.choose(1, 3, 300, 7)
    assert wide is not None
    assert (wide.blocks, wide.rows) == (4, 12)
    assert wide.shape("tokens writes tables all_entries") == (12 * 32, 16 * 32, 4, 12)
    # One block-row of a single slot, which is what it has of an open block; and none where all queries see the same.
    one = declare(full._replace(branches=1, slots=1), 10**9, packs=True).choose(1, 2, 300, 1)
    assert one is not None
    assert one.rows == 1
    assert all(b.rows is None for b in declare(full._replace(full_attention=True), 10**9, packs=True).declared)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 310), st.sampled_from([512, 2048, 10**9]))
def test_the_cheapest_that_holds_a_step_is_chosen(sequences: int, blocks: int, pages: int, max_tokens: int) -> None:
    all_ = buckets(max_tokens=max_tokens)
    chosen = all_.choose(sequences, blocks, pages)
    holding = [b for b in all_.declared if b.sequences >= sequences and b.blocks >= blocks and b.pages >= pages]
    assert (chosen is None) == (not holding)
    if chosen is not None:
        assert chosen in holding
        assert chosen.tokens == min(b.tokens for b in holding)
        assert chosen.pages == min(b.pages for b in holding if b.tokens == chosen.tokens)


def test_none_computes_more_tokens_than_a_step_may_unless_it_is_the_smallest() -> None:
    assert {(b.sequences, b.blocks) for b in buckets(max_tokens=1024).declared} == {
        (1, 2),
        (1, 4),
        (1, 8),
        (4, 2),
    }
    assert {(b.sequences, b.blocks) for b in buckets(max_tokens=1).declared} == {(1, 2)}


@pytest.mark.parametrize(("branches", "least"), [(1, 2), (65, 3)])
def test_windows_have_as_many_cells_as_there_are_branches(branches: int, least: int) -> None:
    assert min(b.blocks for b in buckets(branches=branches).declared) == least


@pytest.mark.parametrize(
    ("length", "full", "spans", "lengths"),
    [(32, False, 4, (16, 16)), (24, False, 4, (16, 8)), (16, False, 4, (16,)), (24, True, 1, (16,) * 6)],
)
def test_spans_are_divided_into_entries_of_few_queries(
    length: int, full: bool, spans: int, lengths: tuple[int, ...]
) -> None:
    bucket = Bucket(2, 4, 300, 4, 1, length, 8, full_attention=full, max_queries=16)
    assert (bucket.spans, bucket.entry_lengths, bucket.entries) == (spans, lengths, spans * len(lengths))
    assert sum(lengths) * spans == bucket.cells
    assert bucket.shape("all_entries pages") == (2 * bucket.entries, 300)
    assert bucket._replace(max_queries=None).entries == spans
