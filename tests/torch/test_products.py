"""Rows of linear layers do not depend on one another, whatever the matrix library does with other numbers of rows."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu import processor
from lopa_ascend.backend.cpu.processor import emulated_dtypes, packed_dtypes
from lopa_ascend.backend.cpu.products import Multiply, Products, pack, takes_packed
from tests import rounding
from tests.tiny import write_dream

WIDTHS = [(768, 2304), (768, 4096), (2048, 768), (3584, 512), (192, 512)]
"""(inputs, outputs)."""
plain_linear = F.linear


def in_halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer whose sums have another order than torch's."""
    half = x.shape[1] // 2
    total = plain_linear(x[:, :half], weight[:, :half]) + plain_linear(x[:, half:], weight[:, half:])
    return total if bias is None else total + bias


def by_row_count(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums in another order with 33 to 300 rows, as oneDNN does in bfloat16 on AMX."""
    return in_halves(x, weight, bias) if 33 <= len(x) <= 300 else plain_linear(x, weight, bias)


def by_large_count(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums in another order from 65 rows on, and in a third one at the end of 128 rows or fewer."""
    if len(x) <= 128:
        return torch.cat([plain_linear(x[:-3], weight, bias), in_halves(x[-3:], weight, bias)])
    return plain_linear(x, weight, bias)


def by_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A library that sums in another order in the last row of any call."""
    return torch.cat([plain_linear(x[:-1], weight, bias), in_halves(x[-1:], weight, bias)])


def operands(k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k + n)
    sizes = ((700, k), (n, k), (n,))
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


def differing_rows(products: Products, x: Tensor, weight: Tensor, bias: Tensor) -> list[tuple[int, int]]:
    """(first row, number of rows) of the parts of x whose product alone is not their product among all."""
    rng = random.Random(0)
    whole = products(x, weight, bias)
    counts = [1, 2, 5, 15, 16, 17, 31, 33, 64, 65, 100, 127, 129, 255, 257, 300, 511, 699]
    parts = [(rng.randrange(len(x) - count), count) for count in counts]
    return [
        (first, count)
        for first, count in parts
        if not torch.equal(products(x[first : first + count], weight, bias), whole[first : first + count])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_are_independent_on_this_processor(widths: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = operands(*widths, dtype)
    products = Products(emulated_dtypes(), F.linear)
    assert products.settle([weight]).startswith("rows are independent")
    assert differing_rows(products, x, weight, bias) == []


@pytest.mark.parametrize("dtype", [dtype for dtype in (torch.float32, torch.bfloat16) if takes_packed(dtype)], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_packed_weights_keep_rows_independent_and_give_the_same_product(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = operands(*widths, dtype)
    products, packed = Products((), F.linear), pack(weight)
    assert (packed.shape, packed.dtype, packed.nbytes) == (weight.shape, dtype, weight.nbytes)
    assert torch.equal(packed.to_dense(), weight)
    assert products.settle([packed]).startswith("rows are independent")
    assert differing_rows(products, x, packed, bias) == []
    expected = x.double() @ weight.double().T + bias.double()
    bound = 2**-7 if dtype == torch.bfloat16 else rounding.bound(widths[0])
    assert float((products(x, packed, bias) - expected).abs().max() / expected.abs().max()) < bound


def test_a_packed_and_a_plain_weight_of_one_shape_are_settled_by_themselves() -> None:
    x, weight, bias = operands(192, 512, torch.float32)
    products = Products((), by_row_count)
    products.settle([pack(weight), weight])
    assert differing_rows(products, x, weight, bias) == []
    assert differing_rows(products, x, pack(weight), bias) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_change_no_token(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_packed(getattr(torch, dtype)):
        pytest.skip(f"oneDNN packs no {dtype} weights on this processor")
    write_dream(tmp_path, hidden=64, heads=4, kv_heads=2)
    monkeypatch.setattr("lopa_ascend.backend.cpu.native.bfloat16_instructions", lambda: None)  # no kernel of ours
    params = DecodingParams(num_branches=3, max_new_tokens=64, tau_conf=0.3, ignore_eos=True)

    def answer(*dtypes: torch.dtype) -> tuple[Any, ...]:
        monkeypatch.setattr("lopa_ascend.backend.cpu.ops.packed_dtypes", lambda: frozenset(dtypes))
        llm = LLM(tmp_path, dtype=dtype)
        assert llm.engine.runner.eager.model.head.is_mkldnn is bool(dtypes)
        (output,) = llm.generate([[5, 6, 7, 8]], params, quiet=True)
        return output.token_ids, output.max_probs

    token_ids, max_probs = answer(torch.float32, torch.bfloat16)
    plain_ids, plain_probs = answer()
    assert token_ids == plain_ids
    assert max_probs == pytest.approx(plain_probs, abs=0 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    ("is_intel", "has_avx512", "has_bfloat16", "packed"),
    [
        (False, True, True, {torch.float32, torch.bfloat16}),
        (False, True, False, {torch.float32}),
        (False, False, False, set()),
        (True, True, True, {torch.bfloat16}),
    ],
)
def test_weights_are_packed_where_the_processor_gains(
    is_intel: bool, has_avx512: bool, has_bfloat16: bool, packed: set[torch.dtype],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {'GenuineIntel' if is_intel else 'AuthenticAMD'}\n")
    monkeypatch.setattr(processor, "CPU_INFO", info)
    monkeypatch.setattr(processor, "IS_X86", True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    assert packed_dtypes() == {dtype for dtype in packed if takes_packed(dtype)}
    info.unlink()
    assert torch.float32 not in packed_dtypes(), "/proc/cpuinfo is missing, so the processor may be from Intel"
    monkeypatch.setattr(processor, "IS_X86", False)
    assert packed_dtypes() == frozenset()


@pytest.mark.parametrize(("multiply", "rows"), [(by_row_count, 64), (by_large_count, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_library_that_goes_by_the_number_of_rows_is_given_the_same_number(
    multiply: Multiply, rows: int, dtype: torch.dtype
) -> None:
    x, weight, bias = operands(192, 512, dtype)
    products = Products([torch.bfloat16], multiply)
    assert differing_rows(products, x, weight, bias), "without settling, rows depend on one another"
    assert products.settle([weight]) == f"rows are independent, because {rows} are computed at a time"
    assert differing_rows(products, x, weight, bias) == []
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(products(x, weight, bias).double(), expected, rtol=2**-7, atol=1e-1)


def test_rows_that_depend_on_one_another_anyway_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    x, weight, bias = operands(192, 512, torch.float32)
    products = Products([], by_place)
    found = products.settle([weight, weight[:100]])
    assert found == (
        "rows depend on one another in their last bits, with weights [100, 192] in torch.float32, "
        "[512, 192] in torch.float32"
    )
    assert caplog.messages == [f"{found}: a request's tokens may depend on the requests beside it"]
    torch.testing.assert_close(products(x, weight, bias), x @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_a_request_is_the_same_alone_and_among_others_on_such_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "linear", by_row_count)
    monkeypatch.setattr("lopa_ascend.backend.cpu.ops.packed_dtypes", frozenset)
    write_dream(tmp_path, hidden=64, heads=4, kv_heads=2)
    prompts: list[Any] = [[5 + i for i in range(count)] for count in (3, 40, 70)]
    params = DecodingParams(num_branches=3, max_new_tokens=64, tau_conf=0.3, ignore_eos=True)

    def answers(llm: LLM, *groups: list[Any]) -> list[tuple[Any, ...]]:
        outputs = [output for group in groups for output in llm.generate(group, params, quiet=True)]
        return [(output.token_ids, output.max_probs) for output in outputs]

    llm = LLM(tmp_path, enable_prefix_caching=False)
    (rank,) = llm.engine.ranks
    assert rank.linear == "rows are independent, because 64 are computed at a time"
    assert answers(llm, prompts) == answers(llm, *([prompt] for prompt in prompts))
    monkeypatch.setattr(Products, "settle", lambda *_: "unsettled")
    unsettled = LLM(tmp_path, enable_prefix_caching=False)
    assert answers(unsettled, prompts) != answers(unsettled, *([prompt] for prompt in prompts))


MANY_NUMBERS_OF_ROWS = """
import lopa_ascend, resource, torch
from lopa_ascend.backend.cpu.products import multiply_packed, pack

weights = [pack(torch.randn(outputs, inputs)) for inputs, outputs in ((192, 576), (192, 2048), (1024, 192))]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for rows in range(16, 1000, 3):
    for weight in weights:
        multiply_packed(torch.randn(rows, weight.shape[1]), weight, None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_kernels_for_many_numbers_of_rows_do_not_fill_the_memory() -> None:
    """oneDNN keeps kernels for each number of rows, by default up to a thousand: 614 MiB in this test."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    run = subprocess.run([sys.executable, "-c", MANY_NUMBERS_OF_ROWS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 350
