"""silu on a CPU: the definition, with rows that do not depend on their neighbours or on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.backend.cpu.activation import SHARE, VECTOR, plain_silu, silu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def numbers(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random gates [rows, size], as the first half of wider rows."""
    generator = torch.Generator().manual_seed(rows * 100_003 + size)
    return (4 * torch.randn(rows, 2 * size, generator=generator)).to(dtype)[:, :size]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    size=st.sampled_from([VECTOR, 3 * VECTOR, 2048, 1000, 2048 + 32, SHARE + VECTOR]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_row_has_the_same_bits_alone_among_others_and_with_any_threads(rows, size, dtype, data) -> None:
    rows = min(rows, 8_000_000 // size // 8)
    x = numbers(rows, size, dtype)
    torch.set_num_threads(1)
    expected = silu(x)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(silu(x), expected), threads
        first = data.draw(st.integers(0, rows - 1))
        last = data.draw(st.integers(first + 1, rows))
        assert torch.equal(silu(x[first:last]), expected[first:last])
        assert torch.equal(silu(x[first:last].contiguous()), expected[first:last])


def test_rows_may_stand_in_more_dimensions() -> None:
    x = numbers(6, 2048, torch.bfloat16)
    assert torch.equal(silu(x.unflatten(0, (2, 3))), silu(x).view(2, 3, 2048))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [15, 16, 17, 31, 32, 33, 47, 48, 49, 50, 51, 52, 64, 65, 939])
def test_shares_that_just_begin_to_be_split(rows: int, threads: int) -> None:
    x = numbers(rows, 2048, torch.float32)
    torch.set_num_threads(1)
    expected = torch.cat([silu(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    assert torch.equal(silu(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1000, 2048])
def test_values(dtype: torch.dtype, size: int) -> None:
    x = numbers(70, size, dtype)
    wide = x.double()
    torch.testing.assert_close(silu(x), (wide / (1 + (-wide).exp())).to(dtype))
    torch.testing.assert_close(silu(x), plain_silu(x))


def test_extremes() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -200.0, 200.0, torch.nan]).repeat(2, VECTOR)
    x = x[:, : 5 * VECTOR]
    assert torch.equal(silu(x).isnan(), plain_silu(x).isnan())
    assert torch.equal(silu(x).nan_to_num(7.0), plain_silu(x).nan_to_num(7.0))
