"""Linear layers of integers in C++: the bits of their definitions, by all instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.native import IntegerOps
from lopa_ascend.backend.cpu.native.integers import INSTRUCTIONS
from lopa_ascend.backend.interface import Int4Weight
from tests.tiers import examples
from tests.torch.native import integer_ops
from tests.torch.paging import randn
from tests.torch.test_int4 import activations, draw
from tests.torch.test_int8 import draw as draw_int8


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def ops(request: pytest.FixtureRequest) -> IntegerOps:
    return integer_ops(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


rows = st.integers(0, 40) | st.integers(95, 110)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=examples(60), deadline=None)
@given(rows, st.integers(1, 700), st.integers(1, 100), st.booleans(), dtypes)
def test_int8(ops: IntegerOps, rows: int, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, weight_scale = draw_int8(outputs, inputs, seed=rows), randn(outputs, seed=1)
    bias = randn(outputs, seed=2).to(dtype) if has_bias else None
    codes, scale = activations(rows, inputs)
    stored = ops.packed(weight)
    assert stored.dim() == 3
    found = ops.quant_linear(codes, scale, stored, weight_scale, bias, dtype)
    assert torch.equal(found, definition.quant_linear(codes, scale, weight, weight_scale, bias, dtype))
    assert found.dtype == dtype


@settings(max_examples=examples(60), deadline=None)
@given(rows, st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 128]), st.booleans(), st.booleans(), dtypes)
def test_int4(
    ops: IntegerOps,
    rows: int,
    groups: int,
    strips: int,
    group: int,
    has_zeros: bool,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    weight = draw(32 * strips, groups * group, group, has_zeros=has_zeros, seed=rows)
    bias = randn(32 * strips, seed=2).to(dtype) if has_bias else None
    codes, scale = activations(rows, groups * group)
    stored = ops.stored_int4(weight)
    assert stored.scale.dim() == 3
    found = ops.int4_linear(codes, scale, stored, bias, dtype)
    assert torch.equal(found, definition.int4_linear(codes, scale, weight, bias, dtype))
    assert found.dtype == dtype


@pytest.mark.parametrize("inputs", [128, 18944])
def test_the_largest_sums_are_exact(ops: IntegerOps, inputs: int) -> None:
    """Signs as the weight's, so that an instruction that saturates in between would be found out."""
    codes = torch.full((5, inputs), 127, dtype=torch.int8)
    codes[1], codes[2, ::2], codes[3, 1::2] = -127, -127, -127
    weight = torch.full((32, inputs), -128, dtype=torch.int8)
    weight[1], weight[2, ::2], weight[3, 1::2], weight[4] = 127, 127, 127, 0
    scale, weight_scale = torch.ones(5), torch.ones(32)
    found = ops.quant_linear(codes, scale, ops.packed(weight), weight_scale, None, torch.float32)
    assert torch.equal(found.double(), (codes.double() @ weight.double().T).float().double())
    nibbles = (weight.int() + 128) // 16
    for zero in (0, 15):
        zeros = torch.full((32, inputs // 128), zero, dtype=torch.uint8)
        int4 = Int4Weight((nibbles[:, ::2] | nibbles[:, 1::2] << 4).byte(), torch.ones(32, inputs // 128), zeros)
        out = ops.int4_linear(codes, scale, ops.stored_int4(int4), None, torch.float32)
        assert torch.equal(out, definition.int4_linear(codes, scale, int4, None, torch.float32))


def test_rows_do_not_depend_on_one_another(ops: IntegerOps, threads: int) -> None:
    codes, scale = activations(150, 256)
    int8, int4 = ops.packed(draw_int8(96, 256)), ops.stored_int4(draw(96, 256, 32, has_zeros=True))
    factors = randn(96, seed=3)

    def results(part: slice) -> list[Tensor]:
        return [
            ops.quant_linear(codes[part], scale[part], int8, factors, None, torch.bfloat16),
            ops.int4_linear(codes[part], scale[part], int4, None, torch.bfloat16),
        ]

    whole = results(slice(None))
    torch.set_num_threads(1)
    for count in range(1, 45):
        part = slice(70 - count, 70)
        for alone, among_others in zip(results(part), whole, strict=True):
            assert torch.equal(alone, among_others[part])


def test_a_row_that_is_not_finite_stays_so_alone(ops: IntegerOps) -> None:
    codes, scale = activations(3, 64)
    scale[1] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        out = ops.quant_linear(codes, scale, ops.packed(draw_int8(32, 64)), torch.ones(32), None, dtype)
        assert out.isnan().all(1).tolist() == [False, True, False]


def test_a_weight_takes_no_more_memory(ops: IntegerOps) -> None:
    weight = draw_int8(96, 256)
    assert ops.packed(weight).nbytes == weight.nbytes
    int4 = draw(96, 256, 32, has_zeros=True)
    assert [x.nbytes for x in ops.stored_int4(int4)] == [x.nbytes for x in int4]
