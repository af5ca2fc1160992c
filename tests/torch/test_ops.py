"""The CPU ops and their definitions against formulas, and what else the CPU ops promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lopa_ascend.backend.cpu import DEVICE, definition
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.cpu.products import Products
from lopa_ascend.backend.interface import Entries
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.runner.batch import slot_mapping
from lopa_ascend.types import KVShape
from tests.tiers import slow_but
from tests.torch.paging import paged_step, randn

OPS = CpuOps()


def either(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on the ops and on their definitions."""
    return pytest.mark.parametrize("ops", [OPS, definition], ids=["fast", "plain"])(test)


def test_what_is_for_an_npu_is_refused_by_name() -> None:
    assert DEVICE.load_ops(EngineConfig()).device.type == "cpu"
    with pytest.raises(ParameterError, match="attention_layout: is for device npu, and this is device cpu"):
        DEVICE.load_ops(EngineConfig(attention_layout="BSH"))


@pytest.mark.parametrize("rows", slow_but([1, 2, 3, 4, 5, 64], [1, 5, 64]))
def test_a_row_of_linear_does_not_depend_on_the_others(rows: int) -> None:
    x, weight, bias = randn(300, 48), randn(80, 48, seed=1), randn(80, seed=2)
    whole = OPS.linear(x, weight, bias)
    assert torch.equal(OPS.linear(x[100 : 100 + rows], weight, bias), whole[100 : 100 + rows])
    torch.testing.assert_close(whole, x @ weight.T + bias)


@either
def test_rms_norm(ops: Any) -> None:
    x, weight = randn(5, 16), randn(16, seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected)


@either
def test_add_rms_norm_gives_the_norm_and_the_sum(ops: Any) -> None:
    x, residual, weight = randn(5, 16), randn(5, 16, seed=1), randn(16, seed=2)
    total = x + residual
    normed, residual = ops.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, ops.rms_norm(total, weight, 1e-6))


@either
def test_rope_rotates_the_halves(ops: Any) -> None:
    x, angle = randn(3, 2, 8), randn(3, 1, 4, seed=1)
    rotated = ops.rope(x, angle.cos(), angle.sin())
    left, right = (
        torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1).contiguous()),
        torch.polar(torch.ones_like(angle), angle),
    )
    expected = left * right
    torch.testing.assert_close(rotated, torch.cat([expected.real, expected.imag], -1))


@either
def test_swiglu(ops: Any) -> None:
    x = randn(4, 12)
    torch.testing.assert_close(ops.swiglu(x), x[:, :6] / (1 + (-x[:, :6]).exp()) * x[:, 6:])


@either
def test_kv_write_spreads_one_token_over_several_positions(ops: Any) -> None:
    cache = torch.zeros(2, 3, PAGE_SIZE, 2, 4)
    k, v = randn(2, 2, 4), randn(2, 2, 4, seed=1)
    ops.kv_write(k, v, cache[0], cache[1], torch.tensor([5, 2 * PAGE_SIZE, 130]), torch.tensor([0, 0, 1]))
    assert torch.equal(cache[0, 0, 5], k[0])
    assert torch.equal(cache[0, 2, 0], k[0])
    assert torch.equal(cache[1, 1, 2], v[1])
    assert int((cache != 0).sum()) == 2 * 3 * 8


def test_the_pool_copies_positions_in_every_layer() -> None:
    pool = KVPool(KVShape(num_layers=3, num_kv_heads=2, head_dim=4), 4, torch.float32, "cpu")
    pool.caches.copy_(randn(*pool.caches.shape))
    before = pool.caches.clone()
    pool.copy([0, 2], [3, 1], 3, 5)
    assert torch.equal(pool.caches[:, :, 3, 3:5], before[:, :, 0, 3:5])
    pool.copy([0, 2], [3, 1], PAGE_SIZE - 1, PAGE_SIZE + 1)
    assert torch.equal(pool.caches[:, :, 3, -1], before[:, :, 0, -1])
    assert torch.equal(pool.caches[:, :, 1, 0], before[:, :, 2, 0])
    changed = (pool.caches != before).flatten(-2).any(-1)
    assert int(changed.sum()) == 2 * 3 * 4
    assert pool.copied_positions == 4


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (100, PAGE_SIZE), (100, PAGE_SIZE + 1), (3, 3 * PAGE_SIZE - 1)])
def test_the_pool_writes_what_another_has_read(begin: int, end: int) -> None:
    one, other = (KVPool(KVShape(num_layers=3, num_kv_heads=2, head_dim=4), 4, torch.float32, "cpu") for _ in range(2))
    one.caches.copy_(randn(*one.caches.shape))
    table, others_table = [2, 0, 3], [1, 3, 0]
    positions = torch.from_numpy(slot_mapping(table, begin, end))
    values = one.read(table, begin, end)
    assert torch.equal(values, one.caches.flatten(2, 3)[:, :, positions])
    other.write(others_table, begin, end, values)
    assert torch.equal(other.read(others_table, begin, end), values)
    assert int((other.caches != 0).sum()) == values.numel()


def one_entry(entries: Entries, i: int) -> Entries:
    """Entry i in a step of its own."""
    prefix = entries.prefixes[entries.prefix_groups[i]]
    return Entries(entries.lengths[i : i + 1], entries.kv_lengths[i : i + 1], entries.page_tables[[i]], (0,), (prefix,))


# Prefixes: none, less than a page, exactly one, more than one. Sequences 2 and 3 have entries of two lengths.
PREFIXES = (0, 40, PAGE_SIZE, 200)
ENTRIES = [
    (3, 4, 4),
    (1, 4, 4),
    (0, 7, 150),
    (3, 4, 90),
    (1, 4, 4),
    (2, 4, 4),
    (3, 2, 4),
    (2, 1, 9),
    (0, 4, 20),
    (3, 4, 4),
]


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (7, 1)])
def test_attention_sees_the_pages_of_its_entry_and_no_further(
    ops: Any, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    dim = 8
    entries, k_cache, v_cache = paged_step(ENTRIES, PREFIXES, kv_heads, dim, dtype)
    q = randn(sum(entries.lengths), heads, dim).to(dtype)
    out = ops.attention(q, k_cache, v_cache, entries)
    assert out.dtype == dtype
    start = 0
    for length, kv_length, pages in zip(entries.lengths, entries.kv_lengths, entries.page_tables, strict=True):
        k, v = (c[pages].flatten(0, 1)[:kv_length].double() for c in (k_cache, v_cache))
        k, v = (c.repeat_interleave(heads // kv_heads, 1) for c in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + length].double(), k) / math.sqrt(dim)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        tolerance = 2e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[start : start + length].double(), expected, rtol=tolerance, atol=tolerance)
        start += length


@either
@pytest.mark.parametrize("max_queries", [1, 3, 7, None])
def test_divided_entries_attend_to_the_same_keys(ops: Any, max_queries: int | None) -> None:
    entries, k_cache, v_cache = paged_step(ENTRIES, PREFIXES, 1, 8, torch.float32)
    q = randn(sum(entries.lengths), 7, 8)
    divided = entries.divided(max_queries)
    assert sum(divided.lengths) == sum(entries.lengths)
    assert max(divided.lengths) == (max_queries or 7)
    assert (divided is entries) == (max_queries in (7, None))
    whole = ops.attention(q, k_cache, v_cache, entries)
    torch.testing.assert_close(ops.attention(q, k_cache, v_cache, divided), whole)


def test_a_prefix_outweighs_or_vanishes_without_overflow() -> None:
    entries, k_cache, v_cache = paged_step([(0, 1, 1)], (3,), 1, 8, torch.float32)
    q = torch.full((1, 1, 8), 100.0)
    values = v_cache.flatten(0, 1)[:, 0]
    k_cache[0, :3], k_cache[0, 3] = -10, 10  # scores differ by 5,657
    torch.testing.assert_close(OPS.attention(q, k_cache, v_cache, entries)[0], values[3])
    k_cache[0, :3], k_cache[0, 3] = 10, -10
    torch.testing.assert_close(OPS.attention(q, k_cache, v_cache, entries)[0], values[:3].mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_a_prefix_once_a_sequence(dtype: torch.dtype) -> None:
    ops, kv_heads, dim = CpuOps(), 2, 8
    entries, k_cache, v_cache = paged_step(ENTRIES, PREFIXES, kv_heads, dim, dtype)
    q = randn(sum(entries.lengths), 4, dim).to(dtype)
    for layer in (1, 2):
        ops.attention(q, k_cache, v_cache, entries)
        positions = sum(PREFIXES) + sum(own for _, _, own in ENTRIES)
        assert ops.gathered_bytes == layer * positions * 2 * kv_heads * dim * dtype.itemsize


DTYPES = (torch.float32, torch.bfloat16)
# Every group in both dtypes; numbers of threads and of heads by turns.
ORDINARY = [(group, (group + at) % 2 + 1, DTYPES[at], (group + at) % 3 + 1) for group in range(1, 8) for at in (0, 1)]


@pytest.mark.parametrize(
    ("group", "kv_heads", "dtype", "threads"),
    slow_but(product(range(1, 8), (1, 2), DTYPES, (1, 2, 3)), ORDINARY),
    indirect=["threads"],
)
def test_attention_of_an_entry_does_not_depend_on_the_others(
    group: int, kv_heads: int, dtype: torch.dtype, threads: int
) -> None:
    dim = 16
    # Every length from 1 to 70, twice in one sequence and once in another, so that all batches hold several entries.
    shapes = [(i % 5, length, 3 + length % 40) for length in range(1, 71) for i in (length, length, length + 2)]
    entries, k_cache, v_cache = paged_step(shapes, (0, 7, 64, 131, 200), kv_heads, dim, dtype)
    q = randn(sum(entries.lengths), group * kv_heads, dim).to(dtype)
    together = OPS.attention(q, k_cache, v_cache, entries)
    differing = []
    for i, (start, length) in enumerate(zip(accumulate(entries.lengths, initial=0), entries.lengths, strict=False)):
        span = slice(start, start + length)
        alone = OPS.attention(q[span], k_cache, v_cache, one_entry(entries, i))
        if not torch.equal(alone, together[span]):
            differing.append(shapes[i])
    assert not differing
    torch.set_num_threads(1)
    assert torch.equal(OPS.attention(q, k_cache, v_cache, entries), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_linear_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = randn(20, 48).to(dtype), randn(2500, 48, seed=1).to(dtype), randn(2500, seed=2).to(dtype)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    found = Products([dtype], F.linear)(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)
    assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("threads", slow_but([1, 2, 3], [1, 3]), indirect=True)
def test_element_wise_results_do_not_depend_on_the_other_rows(dtype: torch.dtype, threads: int) -> None:
    """Row by row as in one batch, which threads cut at places that are no multiple of a vector."""
    ops = CpuOps()
    for rows, inner in ((705, 48), (2117, 20), (1033, 192)):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 2 * inner, generator=generator).to(dtype)
        heads = x.view(rows, 2, inner)
        angles = torch.randn(rows, 1, inner // 2, generator=generator)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weight = torch.randn(2 * inner, generator=generator).to(dtype)
        norms = weight[:inner], weight[inner:], 1e-6
        whole = (
            *(ops.swiglu(x), ops.rope(heads, cos, sin), ops.rms_norm(x, weight, 1e-6)),
            *ops.norm_rope(heads[:, :1], heads[:, 1:], *norms, cos, sin),
        )
        for begin in range(0, rows, 13):
            part = slice(begin, begin + 13)
            assert torch.equal(ops.swiglu(x[part]), whole[0][part])
            assert torch.equal(ops.rope(heads[part], cos[part], sin[part]), whole[1][part])
            assert torch.equal(ops.rms_norm(x[part], weight, 1e-6), whole[2][part])
            alone = ops.norm_rope(heads[part, :1], heads[part, 1:], *norms, cos[part], sin[part])
            assert torch.equal(torch.cat(alone, 1), torch.cat(whole[3:], 1)[part])
