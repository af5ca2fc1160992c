"""The Triton kernels against the plain definitions of the ops, over random shapes, and rows alone and among others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.cuda import kernels
from lopa_ascend.backend.cuda import ops as ops_module
from lopa_ascend.backend.cuda.ops import CudaOps
from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.parallel.collectives import ALONE
from lopa_ascend.score.greedy import GreedyScore
from tests.tiers import examples
from tests.torch.paging import causal_pieces, paged_step, randn

OPS = CudaOps(torch.device("cpu"))
BOUND = {torch.float32: 4e-6, torch.bfloat16: 2**-6}
"""Largest difference, relative and absolute. Triton's interpreter cuts bfloat16 off, where a GPU rounds."""
ATTENTION_BOUND = {torch.float32: 4e-6, torch.float16: 2**-9}
"""In units of the largest value attended to. The interpreter multiplies no bfloat16."""

seeds = st.integers(0, 2**31)
rows = st.integers(1, 5)
sizes = st.sampled_from([1, 16, 48, 100, 192])
dtypes = st.sampled_from(list(BOUND))
every_op = settings(max_examples=examples(15), deadline=None)


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(got, expected, rtol=BOUND[got.dtype], atol=BOUND[got.dtype])


def assert_codes(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], most: int = 1) -> None:
    """Codes may differ by ``most`` where what is quantised was rounded otherwise."""
    torch.testing.assert_close(got[1], expected[1], rtol=1e-2 if most else 0, atol=0)
    assert (got[0].int() - expected[0].int()).abs().max() <= most


@every_op
@given(seeds, rows, sizes, dtypes)
def test_norms(seed: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(2, num_rows, size, seed=seed).to(dtype)
    weight = randn(size, seed=seed + 1).to(dtype)
    assert_near(OPS.rms_norm(x, weight, 1e-6), definition.rms_norm(x, weight, 1e-6))
    normed, total = OPS.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert_near(total, x + residual)
    assert_near(normed, definition.rms_norm(total, weight, 1e-6))
    assert_codes(OPS.rms_norm_quant(x, weight, 1e-6), definition.rms_norm_quant(x, weight, 1e-6))
    codes, scales, total = OPS.add_rms_norm_quant(x, residual.clone(), weight, 1e-6)
    assert_codes((codes, scales), definition.rms_norm_quant(total, weight, 1e-6))
    for row in range(num_rows):
        assert torch.equal(OPS.rms_norm(x[row : row + 1], weight, 1e-6)[0], OPS.rms_norm(x, weight, 1e-6)[row])


@every_op
@given(seeds, rows, sizes, dtypes)
def test_swiglu_and_quantisation(seed: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (4 * randn(num_rows, 2 * size, seed=seed)).to(dtype)
    gate_up[0, :size] = 0
    assert_near(OPS.swiglu(gate_up), definition.swiglu(gate_up))
    assert_codes(OPS.swiglu_quant(gate_up), definition.swiglu_quant(gate_up))
    assert_codes(OPS.quantize(gate_up), definition.quantize(gate_up), most=0)


def test_long_rows_are_quantised_as_short_ones() -> None:
    x = randn(2, 5000)
    assert_codes(OPS.quantize(x), definition.quantize(x), most=0)
    assert_codes(OPS.swiglu_quant(torch.cat([x, x], 1)), definition.swiglu_quant(torch.cat([x, x], 1)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_not_finite(bad: float) -> None:
    x = randn(3, 32)
    x[1, 5] = bad
    codes, scale = OPS.quantize(x)
    weight, ones = torch.ones(16, 32, dtype=torch.int8), torch.ones(16)
    out = OPS.quant_linear(codes, scale, weight, ones, None, torch.float32)
    assert out.isfinite().all(-1).tolist() == [True, False, True]


@every_op
@given(seeds, st.integers(1, 40), st.sampled_from([8, 40, 136]), st.sampled_from([8, 48, 130]), dtypes, st.booleans())
def test_int8_products_are_exact(
    seed: int, num_rows: int, inputs: int, outputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (num_rows, inputs), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scale, weight_scale = randn(num_rows, seed=seed).abs(), randn(outputs, seed=seed + 1).abs()
    bias = randn(outputs, seed=seed + 2).to(dtype) if has_bias else None
    got = OPS.quant_linear(codes, scale, OPS.stored(weight), weight_scale, bias, dtype)
    expected = definition.quant_linear(codes, scale, weight, weight_scale, bias, dtype)
    if dtype == torch.float32:
        assert torch.equal(got, expected)
    else:
        assert_near(got, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = randn(70, 96), torch.randint(-127, 128, (40, 48), dtype=torch.int8)
    by_output = randn(40).abs()

    def results(rows: slice) -> list[Tensor]:
        codes, scale = OPS.swiglu_quant(x[rows])
        product = OPS.quant_linear(codes, scale, weight, by_output, None, torch.float32)
        return [codes, scale, product, OPS.swiglu(x[rows]), OPS.quantize(x[rows])[0]]

    for together, alone in zip(results(slice(None)), results(slice(60, 62)), strict=True):
        assert torch.equal(together[60:62], alone)


@every_op
@given(seeds, rows, st.integers(1, 9), st.sampled_from([8, 16, 48]), dtypes, st.booleans())
def test_rope(seed: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, by_head: bool) -> None:
    x = randn(tokens, heads, dim, seed=seed).to(dtype)
    angles = randn(tokens, heads if by_head else 1, dim // 2, seed=seed + 1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    assert_near(OPS.rope(x, cos, sin), definition.rope(x, cos, sin))


@every_op
@given(seeds, rows, st.integers(1, 9), st.sampled_from([8, 16, 48]), dtypes)
def test_normed_rope_of_parts_of_a_projection(seed: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    q, k, _ = randn(tokens, heads + 4, dim, seed=seed).to(dtype).split([heads, 2, 2], 1)
    q_weight, k_weight = randn(2, dim, seed=seed + 1).to(dtype)
    angles = randn(tokens, 1, dim // 2, seed=seed + 2)
    given = q, k, q_weight, k_weight, 1e-6, angles.cos().to(dtype), angles.sin().to(dtype)
    for got, expected in zip(OPS.norm_rope(*given), definition.norm_rope(*given), strict=True):
        assert_near(got, expected)


@every_op
@given(seeds, rows, st.integers(1, 3), st.sampled_from([8, 48]), st.booleans())
def test_kv_write(seed: int, tokens: int, kv_heads: int, dim: int, spread: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = randn(tokens, 2 * kv_heads, dim, seed=seed).split(kv_heads, 1)
    count = 2 * tokens if spread else tokens
    slots = torch.randperm(3 * PAGE_SIZE, generator=generator)[:count].to(torch.int32 if seed % 2 else torch.int64)
    source = torch.randint(tokens, (count,), generator=generator) if spread else None
    got, expected = torch.zeros(2, 2, 3, PAGE_SIZE, kv_heads, dim)
    OPS.kv_write(k, v, got[0], got[1], slots, source)
    definition.kv_write(k, v, expected[0], expected[1], slots, source)
    assert torch.equal(got, expected)


@every_op
@given(
    seeds, rows, st.integers(1, 9), st.integers(1, 3), st.sampled_from([8, 48]), dtypes,
    st.sampled_from(["shared", "by head", "normed"]), st.booleans(),
)  # fmt: skip
def test_rope_and_write_is_both(
    seed: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kind: str, spread: bool
) -> None:
    """Bit by bit what the ops do one by one."""
    generator = torch.Generator().manual_seed(seed)
    qkv = randn(tokens, heads + 2 * kv_heads, dim, seed=seed).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    angles = randn(tokens, heads + 2 * kv_heads if kind == "by head" else 1, dim // 2, seed=seed + 1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q_weight, k_weight = randn(2, dim, seed=seed + 2).to(dtype)
    count = 2 * tokens if spread else tokens
    slots = torch.randperm(3 * PAGE_SIZE, generator=generator)[:count].int()
    source = torch.randint(tokens, (count,), generator=generator) if spread else None
    got, expected = torch.zeros(2, 2, 3, PAGE_SIZE, kv_heads, dim, dtype=dtype)
    if kind == "normed":
        queries, keys = OPS.norm_rope(q, k, q_weight, k_weight, 1e-6, cos, sin)
    else:
        queries, keys, _ = OPS.rope(qkv, cos, sin).split([heads, kv_heads, kv_heads], 1)
    OPS.kv_write(keys, v, expected[0], expected[1], slots, source)
    norms = (q_weight, k_weight) if kind == "normed" else None
    assert torch.equal(OPS.rope_and_write(qkv, norms, 1e-6, (cos, sin), (got[0], got[1]), slots, source), queries)
    assert torch.equal(got, expected)


@st.composite
def step_shapes(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], tuple[int, ...]]:
    """``shapes`` and ``prefixes`` of ``paged_step``."""
    prefixes = draw(st.lists(st.sampled_from([0, 5, PAGE_SIZE, 150]), min_size=1, max_size=2))
    entry = st.tuples(st.integers(0, len(prefixes) - 1), st.integers(1, 20), st.sampled_from([1, 20, 64, 130]))
    return draw(st.lists(entry, min_size=1, max_size=3)), tuple(prefixes)


@settings(max_examples=examples(15), deadline=None)
@given(
    seeds,
    step_shapes(),
    st.integers(1, 2),
    st.integers(1, 7),
    st.sampled_from([8, 48]),
    st.sampled_from(list(ATTENTION_BOUND)),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_attention(
    seed: int,
    step: tuple[list[tuple[int, int, int]], tuple[int, ...]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    causal: list[bool],
) -> None:
    """It looks at no position that an entry does not see: those are NaN."""
    shapes, prefixes = step
    entries, k_cache, v_cache = paged_step(shapes, prefixes, kv_heads, dim, dtype)
    spans = zip(entries.lengths, entries.kv_lengths, causal, strict=False)
    entries = replace(entries, causal=tuple(is_causal and length <= keys for length, keys, is_causal in spans))
    q = randn(sum(entries.lengths), kv_heads * group, dim, seed=seed).to(dtype)
    got = OPS.attention(q, k_cache, v_cache, entries)
    expected = definition.attention(q, k_cache, v_cache, entries)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    scale = v_cache.nan_to_num().abs().max()
    assert (got.float() - expected.float()).abs().max() <= ATTENTION_BOUND[dtype] * scale


def test_an_entry_does_not_depend_on_the_others() -> None:
    entries, k_cache, v_cache = paged_step([(0, 9, 33), (0, 70, 100), (1, 3, 7)], (130, 0), 2, 16, torch.float16)
    entries = replace(entries, causal=(False, True, True))
    q = randn(sum(entries.lengths), 6, 16).half()
    together = OPS.attention(q, k_cache, v_cache, entries).split(entries.lengths)
    for index, (rows, out) in enumerate(zip(q.split(entries.lengths), together, strict=True)):
        one = slice(index, index + 1)
        shape = entries.lengths[one], entries.kv_lengths[one], entries.page_tables[one]
        alone = Entries(*shape, (0,), (0,), causal=entries.causal[one])
        assert torch.equal(OPS.attention(rows, k_cache, v_cache, alone), out)


@pytest.mark.parametrize("dtype", list(ATTENTION_BOUND))
def test_the_bits_of_a_query_do_not_depend_on_who_merges_its_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in a step, programs share the parts of its keys; among many entries none is shared."""
    entries, k_cache, v_cache = paged_step([(0, 7, 1040), (0, 9, 200), (1, 3, 7)], (1030, 0), 2, 16, dtype)
    entries = replace(entries, causal=(False, True, True))
    q = randn(19, 6, 16).to(dtype)
    shared = OPS.attention(q, k_cache, v_cache, entries)
    expected = definition.attention(q, k_cache, v_cache, entries)
    assert (shared.float() - expected.float()).abs().max() <= ATTENTION_BOUND[dtype] * v_cache.nan_to_num().abs().max()
    monkeypatch.setattr(ops_module, "FEW_PROGRAMS", 0)
    monkeypatch.delattr(kernels, "merge_rows")
    assert torch.equal(OPS.attention(q, k_cache, v_cache, entries), shared)


@pytest.mark.parametrize("dtype", list(ATTENTION_BOUND))
def test_a_causal_span_has_the_same_bits_however_it_is_cut(dtype: torch.dtype) -> None:
    entries, k_cache, v_cache = paged_step([(0, 150, 290)], (0,), 2, 16, dtype)
    q = randn(150, 6, 16).to(dtype)
    whole, cut, single = (
        OPS.attention(q, k_cache, v_cache, causal_pieces(140, 290, cuts, entries.page_tables))
        for cuts in ((), (150, 151, 200, 280), range(290))
    )
    assert torch.equal(whole, cut)
    assert torch.equal(whole, single)


def test_kv_lengths_may_lie_on_the_device() -> None:
    entries, k_cache, v_cache = paged_step([(0, 8, 33), (0, 8, 100)], (130,), 2, 16, torch.float32)
    q = randn(16, 6, 16)
    lengths = torch.tensor(entries.kv_lengths, dtype=torch.int32)
    there = replace(entries, kv_lengths=(), kv_lengths_on_device=lengths)
    assert torch.equal(OPS.attention(q, k_cache, v_cache, there), OPS.attention(q, k_cache, v_cache, entries))


@pytest.mark.parametrize("confidence", ["max_prob", "margin", "neg_entropy"])
@settings(max_examples=examples(10), deadline=None)
@given(seeds, rows, st.sampled_from([3, 500, 5000]), dtypes, st.integers(0, 2))
def test_scores(confidence: str, seed: int, num_rows: int, size: int, dtype: torch.dtype, mask: int) -> None:
    """In one pass what torch computes in several, with ties, ids that do not exist, and values that are not finite."""
    logits = (4 * randn(num_rows, size + 3, seed=seed)).round().to(dtype)[:, :size]
    logits[0, mask] = 50
    if num_rows > 2:
        logits[1, seed % size], logits[2, seed % size] = math.nan, math.inf
    got, expected = (
        GreedyScore(range(size), mask, size - 1 if size > 3 else size, ALONE, ops, confidence)(logits)
        for ops in (OPS, CpuOps())
    )
    finite = expected.probs.isfinite()
    assert finite.tolist() == got.probs.isfinite().tolist()
    assert torch.equal(got.ids[finite], expected.ids[finite])
    torch.testing.assert_close(got.probs[finite], expected.probs[finite], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(got.confidences[finite], expected.confidences[finite], rtol=2e-5, atol=2e-5)


def test_linear_says_whether_rows_are_independent() -> None:
    x, weight, bias = randn(3, 16), randn(24, 16), randn(24)
    torch.testing.assert_close(OPS.linear(x, OPS.stored(weight), bias), x @ weight.T + bias)
    assert OPS.settle([weight]).startswith("rows ")
