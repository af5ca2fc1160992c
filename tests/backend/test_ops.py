"""The CPU ops against plain formulas; they define what every other device must do."""

from __future__ import annotations

import math

import pytest
import torch

from lopa_ascend.backend import Entries, load_ops
from lopa_ascend.backend.cpu import widened_linear
from lopa_ascend.pages import PAGE_SIZE

OPS = load_ops("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'tpu'; choose one of cpu"):
        load_ops("tpu")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64])
def test_a_row_of_linear_does_not_depend_on_the_others(rows: int) -> None:
    x, weight, bias = randn(300, 48), randn(80, 48, seed=1), randn(80, seed=2)
    whole = OPS.linear(x, weight, bias)
    assert torch.equal(OPS.linear(x[100 : 100 + rows], weight, bias), whole[100 : 100 + rows])
    torch.testing.assert_close(whole, x @ weight.T + bias)


def test_rms_norm() -> None:
    x, weight = randn(5, 16), randn(16, seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-6), expected)


def test_add_rms_norm_gives_the_norm_and_the_sum() -> None:
    x, residual, weight = randn(5, 16), randn(5, 16, seed=1), randn(16, seed=2)
    total = x + residual
    normed, residual = OPS.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, OPS.rms_norm(total, weight, 1e-6))


def test_rope_turns_the_halves() -> None:
    x, angle = randn(3, 2, 8), randn(3, 1, 4, seed=1)
    turned = OPS.rope(x, angle.cos(), angle.sin())
    left, right = (
        torch.view_as_complex(torch.stack([x[..., :4], x[..., 4:]], -1).contiguous()),
        torch.polar(torch.ones_like(angle), angle),
    )
    expected = left * right
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1))


def test_swiglu() -> None:
    x = randn(4, 12)
    torch.testing.assert_close(OPS.swiglu(x), x[:, :6] / (1 + (-x[:, :6]).exp()) * x[:, 6:])


def test_kv_write_spreads_one_token_over_several_slots() -> None:
    cache = torch.zeros(2, 3, PAGE_SIZE, 2, 4)
    k, v = randn(2, 2, 4), randn(2, 2, 4, seed=1)
    OPS.kv_write(k, v, cache[0], cache[1], torch.tensor([5, 2 * PAGE_SIZE, 130]), torch.tensor([0, 0, 1]))
    assert torch.equal(cache[0, 0, 5], k[0])
    assert torch.equal(cache[0, 2, 0], k[0])
    assert torch.equal(cache[1, 1, 2], v[1])
    assert int((cache != 0).sum()) == 2 * 3 * 8


def test_kv_copy_moves_positions_in_every_layer() -> None:
    caches = randn(2, 3, 4, PAGE_SIZE, 2, 4)
    before = caches.clone()
    OPS.kv_copy(caches, torch.tensor([3, 4]), torch.tensor([PAGE_SIZE, 3 * PAGE_SIZE + 1]))
    assert torch.equal(caches[:, :, 1, 0], before[:, :, 0, 3])
    assert torch.equal(caches[:, :, 3, 1], before[:, :, 0, 4])


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_attention_sees_the_pages_of_its_entry_and_no_further(heads: int) -> None:
    dim, kv_heads = 8, 2
    k_cache, v_cache = randn(6, PAGE_SIZE, kv_heads, dim), randn(6, PAGE_SIZE, kv_heads, dim, seed=1)
    entries = Entries((3, 3, 5), (140, 140, 20), torch.tensor([[4, 1], [0, 5], [2, 2]]))
    q = randn(11, heads, dim, seed=2)
    out = OPS.attention(q, k_cache, v_cache, entries)
    start = 0
    for length, kv_length, pages in zip(entries.lengths, entries.kv_lengths, entries.page_tables, strict=True):
        k, v = (c[pages].flatten(0, 1)[:kv_length].repeat_interleave(heads // kv_heads, 1) for c in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + length], k) / math.sqrt(dim)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        torch.testing.assert_close(out[start : start + length], expected.flatten(1))
        start += length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_linear_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = randn(20, 48).to(dtype), randn(2500, 48, seed=1).to(dtype), randn(2500, seed=2).to(dtype)
    expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
    torch.testing.assert_close(widened_linear(x, weight, bias), expected, rtol=2**-7, atol=1e-2)
    assert (widened_linear(x, weight, bias) == expected).float().mean() > 0.99
