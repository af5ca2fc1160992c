"""Causal entries of attention: what a query sees, and that its bits do not depend on how a span is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE
from tests.tiers import examples
from tests.torch.native import native_ops
from tests.torch.paging import causal_pieces, paged_step, randn

BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Any:
    return CpuOps() if request.param == "torch" else native_ops()


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 300),
    st.integers(1, 300),
    st.lists(st.integers(1, 600), max_size=4),
    st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    st.sampled_from(list(BOUND)),
)
def test_a_query_sees_what_is_before_it_however_its_span_is_cut(
    ops: Any, begin: int, length: int, cuts: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """What lies behind a query is NaN, and what lies behind the last one too."""
    (kv_heads, group), dim, end = heads, 16, begin + length
    entries, k_cache, v_cache = paged_step([(0, length, end)], (0,), kv_heads, dim, dtype)
    q = randn(length, kv_heads * group, dim, seed=length).to(dtype)
    table = entries.page_tables
    # One query at a time needs no mask.
    alone = replace(
        entries, lengths=(1,) * length, kv_lengths=tuple(range(begin + 1, end + 1)),
        page_tables=table.expand(length, -1), prefix_groups=(0,) * length,
    )  # fmt: skip
    expected = definition.attention(q, k_cache, v_cache, alone)
    whole = ops.attention(q, k_cache, v_cache, causal_pieces(begin, end, [], table))
    scale = v_cache.float().nan_to_num().abs().max()
    assert (whole.float() - expected.float()).abs().max() <= BOUND[dtype] * scale
    cut = causal_pieces(begin, end, cuts, table)
    assert torch.equal(ops.attention(q, k_cache, v_cache, cut), whole)
    assert torch.equal(ops.attention(q, k_cache, v_cache, cut.divided(16)), whole)
    defined = definition.attention(q, k_cache, v_cache, replace(entries, causal=(True,)))
    assert (defined.float() - expected.float()).abs().max() <= BOUND[dtype] * scale


@pytest.mark.parametrize("dtype", list(BOUND))
def test_causal_entries_and_others_lie_side_by_side(ops: Any, dtype: torch.dtype) -> None:
    entries, k_cache, v_cache = paged_step([(0, 9, 40), (1, 5, 5), (0, 9, 40)], (0, PAGE_SIZE), 2, 16, dtype)
    mixed = replace(entries, causal=(True, True, False))
    q = randn(sum(entries.lengths), 6, 16).to(dtype)
    expected = definition.attention(q, k_cache, v_cache, mixed).float()
    found = ops.attention(q, k_cache, v_cache, mixed).float()
    assert (found - expected).abs().max() <= BOUND[dtype] * v_cache.float().nan_to_num().abs().max()
    alone = ops.attention(q[9:14], k_cache, v_cache, one(mixed, 1)).float()
    assert torch.equal(alone, found[9:14])


def one(entries: Entries, i: int) -> Entries:
    """Entry i in a step of its own."""
    return Entries(
        entries.lengths[i : i + 1], entries.kv_lengths[i : i + 1], entries.page_tables[[i]], (0,),
        (entries.prefixes[entries.prefix_groups[i]],), causal=entries.causal[i : i + 1],
    )  # fmt: skip
