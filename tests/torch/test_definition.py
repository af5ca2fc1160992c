"""The fast CPU ops against their plain definitions, over random shapes.

The bounds cover the rounding errors of both sides. For attention they are about four times the largest difference in
1,500 random steps, which was 5e-7 of the largest value in float32, and 0.0042 in bfloat16.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import PAGE_SIZE
from tests.tiers import examples
from tests.torch.native import native_ops
from tests.torch.paging import paged_step, randn

ATTENTION_BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Largest difference of two attention results, in units of the largest value attended to."""
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Largest difference of two other results, relative and absolute."""

seeds = st.integers(0, 2**31)
row_counts = st.integers(1, 70)
dtypes = st.sampled_from(list(BOUND))
every_op = settings(max_examples=examples(40))
vector_sizes = st.sampled_from([16, 64, 80, 192])
"""Sizes that the ops in C++ compute; others they leave to torch."""


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    """The CPU's ops by torch, and in C++."""
    return CpuOps() if request.param == "torch" else native_ops()


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(got, expected, rtol=BOUND[got.dtype], atol=BOUND[got.dtype])


def test_definitions_have_the_signatures_of_the_ops() -> None:
    functions = {name: function for name, function in vars(definition).items() if inspect.isfunction(function)}
    defined = {name: function for name, function in functions.items() if not name.startswith("_")}
    assert len(defined) == 17
    for name, function in defined.items():
        method = inspect.signature(getattr(Ops, name))
        arguments = [argument for argument in method.parameters.values() if argument.name != "self"]
        assert inspect.signature(function) == method.replace(parameters=arguments), name


@st.composite
def step_shapes(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], tuple[int, ...]]:
    """``shapes`` and ``prefixes`` of ``paged_step``. Sizes come from few values, so that entries share batches."""
    prefixes = draw(st.lists(st.just(0) | st.just(PAGE_SIZE) | st.integers(1, 300), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
    own_keys = draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    entry = st.tuples(st.integers(0, len(prefixes) - 1), st.sampled_from(lengths), st.sampled_from(own_keys))
    return draw(st.lists(entry, min_size=1, max_size=8)), tuple(prefixes)


@settings(max_examples=examples(200))
@given(seeds, step_shapes(), st.integers(1, 3), st.integers(1, 7), st.sampled_from([8, 16, 48, 64]), dtypes)
def test_planned_attention_is_plain_attention(
    ops: CpuOps,
    seed: int,
    step: tuple[list[tuple[int, int, int]], tuple[int, ...]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    """Neither looks at a position that its entry does not see: those are NaN."""
    shapes, prefixes = step
    entries, k_cache, v_cache = paged_step(shapes, prefixes, kv_heads, dim, dtype)
    q = randn(sum(entries.lengths), kv_heads * group, dim, seed=seed).to(dtype)
    planned = ops.attention(q, k_cache, v_cache, entries)
    plain = definition.attention(q, k_cache, v_cache, entries)
    assert (planned.dtype, planned.shape) == (plain.dtype, plain.shape) == (dtype, (len(q), kv_heads * group * dim))
    largest_value = v_cache.float().nan_to_num().abs().max()
    assert (planned.float() - plain.float()).abs().max() <= ATTENTION_BOUND[dtype] * largest_value


@every_op
@given(seeds, st.integers(1, 4), st.integers(1, 70), st.booleans(), dtypes)
def test_kv_write(ops: CpuOps, seed: int, kv_heads: int, tokens: int, has_source: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = randn(2, tokens, kv_heads, 8, seed=seed).to(dtype)
    source = torch.randint(tokens, (90,), generator=generator) if has_source else None
    num_written = tokens if source is None else len(source)
    slot_mapping = torch.randperm(3 * PAGE_SIZE, generator=generator)[:num_written]
    caches = randn(2, 3, PAGE_SIZE, kv_heads, 8, seed=seed + 1).to(dtype)
    expected = caches.clone()
    definition.kv_write(k, v, expected[0], expected[1], slot_mapping, source)
    ops.kv_write(k, v, caches[0], caches[1], slot_mapping, source)
    assert torch.equal(caches, expected)


@every_op
@given(seeds, st.integers(1, 9), st.integers(1, 20))
def test_put_rows(ops: CpuOps, seed: int, num_rows: int, width: int) -> None:
    x, values = randn(9, width, seed=seed), randn(num_rows, width, seed=seed + 1)
    rows = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:num_rows].int()
    expected = x.clone()
    definition.put_rows(expected, rows, values)
    ops.put_rows(x, rows, values)
    assert torch.equal(x, expected)


@every_op
@given(seeds, row_counts, st.integers(1, 60), st.integers(1, 60), st.booleans(), dtypes)
def test_linear(ops: CpuOps, seed: int, rows: int, inner: int, outer: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inner, seed=seed).to(dtype), randn(outer, inner, seed=seed + 1).to(dtype)
    bias = randn(outer, seed=seed + 2).to(dtype) if has_bias else None
    expected = definition.linear(x, weight, bias)
    scale = inner**0.5  # sums of products are about this large, and so are the errors of their parts
    assert_near(ops.linear(x, weight, bias) / scale, expected / scale)


@every_op
@given(seeds, row_counts, st.integers(1, 200) | vector_sizes, dtypes)
def test_norms(ops: CpuOps, seed: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = randn(2, rows, hidden, seed=seed).to(dtype)
    weight = randn(hidden, seed=seed + 1).to(dtype)
    assert_near(ops.rms_norm(x, weight, 0.1), definition.rms_norm(x, weight, 0.1))
    expected_norm, expected_total = definition.add_rms_norm(x, residual, weight, 0.1)
    norm, total = ops.add_rms_norm(x, residual.clone(), weight, 0.1)
    assert torch.equal(total, expected_total)
    assert_near(norm, expected_norm)


@every_op
@given(seeds, row_counts, st.integers(1, 200) | vector_sizes, dtypes)
def test_norms_in_int8(ops: CpuOps, seed: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = randn(2, rows, hidden, seed=seed).to(dtype)
    weight = randn(hidden, seed=seed + 1).to(dtype)
    expected = [
        *definition.rms_norm_quant(x, weight, 0.1),
        *definition.add_rms_norm_quant(x, residual, weight, 0.1),
    ]
    got = [*ops.rms_norm_quant(x, weight, 0.1), *ops.add_rms_norm_quant(x, residual.clone(), weight, 0.1)]
    for result, defined in zip(got, expected, strict=True):
        if result.dtype == torch.int8:
            torch.testing.assert_close(result, defined, rtol=0, atol=1)  # a quotient near a half may go either way
        else:
            assert_near(result, defined)


@every_op
@given(seeds, row_counts, st.integers(1, 9), st.sampled_from([2, 8, 64]), st.booleans(), dtypes)
def test_rope(ops: CpuOps, seed: int, rows: int, heads: int, dim: int, differ: bool, dtype: torch.dtype) -> None:
    """Heads that are rotated alike, and heads that differ."""
    x, angles = randn(rows, heads, dim, seed=seed).to(dtype), randn(rows, heads if differ else 1, dim // 2) * 5
    cos, sin = (
        table.view(*angles.shape[:2], -1)
        for table in ops.rope_tables(angles.cos().flatten(0, 1), angles.sin().flatten(0, 1), dtype)
    )
    rotated, expected = ops.rope(x, cos, sin), definition.rope(x, cos, sin)
    # The fast op rounds its products, which are up to |x|, before it adds them.
    bound = 2 * BOUND[dtype] * x.abs().max().float()
    assert (rotated.float() - expected.float()).abs().max() <= bound


@every_op
@given(seeds, row_counts, st.integers(1, 80) | vector_sizes, dtypes)
def test_swiglu(ops: CpuOps, seed: int, rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * inner, seed=seed).to(dtype)
    assert_near(ops.swiglu(gate_up), definition.swiglu(gate_up))
    batch = gate_up[None].expand(2, -1, -1).contiguous()  # of a model in plain torch
    assert_near(ops.swiglu(batch), definition.swiglu(batch))


@every_op
@given(seeds, row_counts, st.integers(1, 5), st.integers(1, 40) | st.sampled_from([16, 48, 64]), dtypes)
def test_norm_rope(ops: CpuOps, seed: int, rows: int, kv_heads: int, half: int, dtype: torch.dtype) -> None:
    """Of parts of one projection, whose values stay as they are."""
    qkv = randn(rows, 4 * kv_heads, 2 * half, seed=seed).to(dtype)
    before = qkv.clone()
    q, k, _ = qkv.split([2 * kv_heads, kv_heads, kv_heads], 1)
    weights, angles = randn(2, 2 * half, seed=seed + 1).to(dtype), randn(rows, 1, half, seed=seed + 2)
    arguments = (q, k, *weights, 0.1, angles.cos().to(dtype), angles.sin().to(dtype))
    for found, expected in zip(ops.norm_rope(*arguments), definition.norm_rope(*arguments), strict=True):
        scale = float(expected.abs().max())
        assert_near(found / scale, expected / scale)
    assert torch.equal(qkv, before)


@every_op
@given(seeds, row_counts, st.integers(1, 80) | vector_sizes, dtypes)
def test_swiglu_in_int8(ops: CpuOps, seed: int, rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * inner, seed=seed).to(dtype)
    (codes, scale), (expected_codes, expected_scale) = ops.swiglu_quant(gate_up), definition.swiglu_quant(gate_up)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    # The products that are quantised may be rounded to neighbours, the largest of a row too.
    torch.testing.assert_close(codes, expected_codes, rtol=0, atol=1 if dtype == torch.float32 else 2)
    torch.testing.assert_close(scale, expected_scale, rtol=BOUND[dtype], atol=BOUND[dtype] / 127)


@pytest.mark.parametrize("dtype", BOUND)
def test_padding_in_page_tables_is_not_read(dtype: torch.dtype) -> None:
    """What ``paged_step`` gives is what the tests above rest on: NaN wherever an entry must not look."""
    entries, k_cache, v_cache = paged_step([(0, 2, 200), (0, 1, 3), (1, 2, 5)], (100, 0), 1, 8, dtype)
    for cache in (k_cache, v_cache):
        for kv_length, pages in zip(entries.kv_lengths, entries.page_tables, strict=True):
            is_nan = cache[pages].flatten(0, 1).isnan().all(-1).flatten()
            assert is_nan.tolist() == [position >= kv_length for position in range(len(is_nan))]
